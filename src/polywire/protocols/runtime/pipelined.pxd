# C-level face of pipelined.py for the other compiled modules; it holds declarations only.

from polywire.protocols.runtime.sequential cimport BareSequential


cdef class BareSlot:
    cdef public bint blocking
    cdef public object cancel
    cdef public object parts
    cdef public object released
    cdef public object session


cdef class BarePipelined(BareSequential):
    cdef public object _slots
    cdef public long _blocking
    cdef public bint _ignores_backlog
    cdef public bint _is_sending_soon
    cdef public object _queued
    cdef public long _unanswered_max

    cpdef object append(self, object slot)
    cpdef object slot_filled(self)
    cdef object _send_filled(self)
