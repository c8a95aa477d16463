# C declarations of bare_journal.py for the other compiled modules.


cdef class BareJournal:
    cdef public object current
    cdef public object free
    cdef public long long position


cdef class Unsynced:
    cdef public object mapping
    cdef public double since
    cdef public long long size
    cdef public object slot
    cdef public long long start
    cdef public long long stop


cdef class BareFlusher:
    cdef public long long _bytes_soon
    cdef public object _clock
    cdef public double _interval
    cdef public BareJournal _journal
    cdef public long long _last_position
    cdef public object _loop
    cdef public bint _running
    cdef public bint _timer
    cdef public dict _unsynced
    cdef public long long synced
    cdef public long long unsynced_bytes
    cdef public long long written
