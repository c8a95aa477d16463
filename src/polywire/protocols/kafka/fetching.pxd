# C declarations of fetching.py for the other compiled modules.

from polywire.protocols.kafka.fetch_responses cimport Entry, ResponseWriter


cdef class Fetching:
    cdef object _answer
    cdef object _broker
    cdef long long _bytes
    cdef long long _bytes_max
    cdef double _deadline
    cdef list _entries
    cdef bint _has_failed
    cdef long long _min_bytes
    cdef Py_ssize_t _number
    cdef object _opened_session
    cdef object _session
    cdef object _slices
    cdef list _stops
    cdef long _ticket
    cdef list _topics

    cdef object _with_pauses(self, object steps, object then, long at_once)
    cdef object _find(self, str name, bytes topic_id)
    cdef object _check(self, object topic, bytes topic_id, long long epoch, Entry entry)
    cdef object _refuse(self, Entry entry, object error)
    cdef bint _read_until(self, double end) except? -1
    cdef bint _read(self, Entry entry) except? -1
    cdef object _take(self, object read, long long space, Entry entry)
    cdef object _wait(self)
    cdef bint _has_ended(self, object wake) except? -1
    cdef object _wait_for(self, Entry entry, object wake)
    cdef object _stop_waiting(self)
    cdef object _finish(self)
