# C-level face of run_queue.py for the other compiled modules; it holds declarations only.

cdef class RunQueue:
    cdef bint _is_due
    cdef object _soon
    cdef double _unexpected_s
    cdef object _waiting
    cdef public object current
    cdef public object now
    cdef public double spent_s
