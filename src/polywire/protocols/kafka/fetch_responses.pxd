# C declarations of fetch_responses.py for the other compiled modules.

from polywire.protocols.kafka.structure_encoder cimport Writer


cdef class Entry:
    cdef public long long bytes_max
    cdef public int error
    cdef public long long high_watermark
    cdef public object in_session
    cdef public long index
    cdef public long long offset
    cdef public object partition
    cdef public object records
    cdef public long long start


cdef class ResponseWriter:
    cdef bytes _between
    cdef bint _flexible
    cdef bytes _tags
    cdef int _version
    cdef Writer _writer

    cpdef void begin_topic(self, str name, bytes topic_id, Py_ssize_t entry_count) except *
    cpdef void end_topic(self) except *
    cpdef void add(self, Entry entry) except *
