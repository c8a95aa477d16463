# C-level face of reply_slots.py for the other compiled modules; it holds declarations only.

from polywire.protocols.runtime.pipelined cimport BareSlot


cdef class Answer(BareSlot):
    cdef public object payload
    cdef public object request_id


cdef class Produced(Answer):
    cdef public object partition
