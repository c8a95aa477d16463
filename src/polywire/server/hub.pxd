# C-level face of hub.py for the other compiled modules; it holds declarations only.

from polywire.server.memory cimport ReceiveMemory
from polywire.server.scheduling cimport IdlePoll, RunQueue


cdef class RequestTimes:
    cdef long long _taken
    cdef public long long appended
    cdef public dict by_kind
    cdef public long long skip
    cdef public long long weight


cdef class Hub:
    cdef dict _held
    cdef public object closed
    cdef public dict connections
    cdef public bint draining
    cdef public IdlePoll idle
    cdef public object ingest
    cdef public bint lending
    cdef public object limits
    cdef public object logins
    cdef public object later
    cdef public ReceiveMemory memory
    cdef public dict moved
    cdef public object pressure
    cdef public object quotas
    cdef public long long refused
    cdef public long long refused_before
    cdef public RequestTimes request_times
    cdef public RunQueue run_queue
    cdef public object slots
    cdef public object soon
    cdef public long long tick

    cpdef object commit(self)
