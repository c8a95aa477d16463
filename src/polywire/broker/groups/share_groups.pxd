# C declarations of share_groups.py.

from polywire.broker.groups.share_reading cimport Reading


cdef class ShareGroups:
    cdef public object _broker
    cdef public object _clock
    cdef public dict _connections
    cdef public dict _counts
    cdef public object _dead_letters
    cdef public object _delay_index
    cdef public object _loop
    cdef public long _prune_above
    cdef public dict _readings
    cdef public object _state
    cdef public object _table
    cdef public object directory
    cdef public object members

    cdef Reading _reading(self, object name, object partition)
    cdef object _next_offset(self, Reading reading)
    cdef long long _new_max(self, Reading reading, object settings) except? -1
    cdef object _store_acquired(self, Reading reading, object found, object delayed, object settings, object done)
    cdef bint _settle(self, Reading reading, object effect, object settings, object done) except? -1
    cdef object _delays(self, object effect)
    cdef object _watch_locks(self, Reading reading)
    cdef object _wake_soon(self, Reading reading)
