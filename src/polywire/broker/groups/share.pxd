# C declarations of share.py for the other compiled modules.


cdef class ShareProgress:
    cdef long long _start
    cdef public dict counts
    cdef public object cursor
    cdef public dict due_ms
    cdef public long long end
    cdef public bint is_dropped

    cdef object _set(self, long long first, long long last, long long deliveries)
    cpdef object apply(self, object runs, object due_ms=*, object cursor=*)
    cpdef bint begins_below(self, long long offset)


cdef class Lock:
    cdef public long long count
    cdef public double deadline
    cdef public long long first
    cdef public long long last
    cdef public object member


cdef class SharePartition:
    cdef public list _by_deadline
    cdef public dict _locks
    cdef public object _order
    cdef public list _released
    cdef public dict _stored_delays
    cdef public ShareProgress progress

    cdef bint _is_available(self, long long offset) except? -1
    cpdef object settle(self, object effect)
    cdef object _take_released(self, object new, long long first, long long end, long long count_max, object lapsed)
    cdef object _lock(self, object offsets, Lock lock)
    cdef object _unlock(self, object offsets)
    cpdef list trimmed(self, long long first_offset)
