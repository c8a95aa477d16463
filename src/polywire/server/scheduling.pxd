# C-level face of scheduling.py for the other compiled modules; it holds declarations only.

cdef class RunQueue:
    cdef bint _is_due
    cdef object _soon
    cdef double _unexpected_s
    cdef object _waiting
    cdef public object current
    cdef public object now
    cdef public double spent_s


cdef class IdlePoll:
    cdef object _clock
    cdef double _end
    cdef double _last
    cdef double _limit_s
    cdef object _loop
    cdef double _pause_s
    cdef bint _polling
    cdef public object poll

    cpdef object bytes_arrived(self)
