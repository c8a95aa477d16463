# C-level face of request_times.py for the other compiled modules; it holds declarations only.

cdef class RequestTimes:
    cdef long long _taken
    cdef public long long appended
    cdef public dict by_kind
    cdef public long long skip
    cdef public long long weight
