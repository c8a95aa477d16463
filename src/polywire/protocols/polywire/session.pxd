# C declarations of session.py.

from polywire.protocols.polywire.fetch cimport RangeFetch
from polywire.protocols.runtime.framed cimport BareFramed


cdef class PolywireSession(BareFramed):
    cdef public object _commands
    cdef public dict _fetches
    cdef public list _frames
    cdef public bint _greeted
    cdef public bint _is_heavy
    cdef public bint _is_scheduled
    cdef public bint _is_writing
    cdef public set _members
    cdef public long _owed
    cdef public object _prefix
    cdef public list _readings
    cdef public object _ready
    cdef public object admission
    cdef public list fetch_shapes
    cdef public object round_robin
    cdef public object shapes

    cdef object _handle(self, int verb, object correlation, object head, object payload)
    cdef object _flush_soon(self)
    cdef object _write_now(self)
    cdef bint _write_ready(self, double end) except -1
    cdef object _advance(self, RangeFetch fetch)
    cpdef object respond_run(self, bytes answers, long count)
    cpdef object _count_response(self, long count=*)
