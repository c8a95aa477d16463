# C declarations of acquiring.py for the other compiled modules.


cdef class Acquiring:
    cdef public object _broker
    cdef public object _by
    cdef public long long _bytes_max
    cdef public double _deadline
    cdef public dict _finds
    cdef public bint _has_committed
    cdef public bint _is_finished
    cdef public Py_ssize_t _number
    cdef public long _pending
    cdef public object _places
    cdef public object _read_handle
    cdef public long long _records_max
    cdef public object _slices
    cdef public list _stops
    cdef public long _ticket
    cdef public bint acquires
    cdef public long long bytes
    cdef public object group
    cdef public object member
    cdef public bint must_respond
    cdef public long long records

    cpdef object find(self, object place)
    cpdef long long add(self, object place, object records, object runs) except? -1
    cpdef object refuse(self, object place, object error)
    cpdef object respond(self)
    cpdef object expect(self)
    cpdef object count(self)
    cpdef object read(self, object places)
    cpdef object finish(self)
    cdef object _run(self)
    cdef bint _read_until(self, double end) except? -1
    cdef bint _is_full(self) except? -1
    cdef bint _read(self, object place) except? -1
    cdef long long _end(self, long long offset) except? -1
    cdef long long _space(self) except? -1
    cdef object _refuse(self, object place, object error)
    cdef object _take(self, object place, object partition, object read, long long offset)
