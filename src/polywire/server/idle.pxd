# C-level face of idle.py for the other compiled modules; it holds declarations only.

cdef class IdlePoll:
    cdef object _clock
    cdef double _end
    cdef double _last
    cdef double _limit_s
    cdef object _loop
    cdef double _pause_s
    cdef bint _polling
    cdef public object look
