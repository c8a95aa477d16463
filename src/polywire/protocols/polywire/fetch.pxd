# C declarations of fetch.py for the other compiled modules.


cdef class RangeFetch:
    cdef bint _bodies
    cdef object _bytes_left
    cdef object _epoch
    cdef long long _offset
    cdef long long _offset_end
    cdef object _owner
    cdef object _partition
    cdef object _read
    cdef bint _started
    cdef list _waits
    cdef public object correlation
    cdef public bint over

    cdef object _begin(self, object broker, long long wait_ms)
    cpdef bint prepare(self, object broker) except -1
    cpdef object advance(self, object broker, object output)
    cdef object _stop_waiting(self)
    cdef object _wait(self, object broker, long long wait_ms)
    cdef object _write(self, object read, object output)
