# C-level face of sending.py for the other compiled modules; it holds declarations only.

from polywire.server.hub cimport Hub


cdef class SendingHalf:
    cdef public Hub _hub
    cdef public object _transport
    cdef bint _clogged
    cdef public long long clogged_tick
    cdef list _released
    cdef public long long sent_bytes
    cdef double _timed_since
    cdef bint _produces
    cdef public str wire
    cdef public long long backlog_max
    cdef public object meter
