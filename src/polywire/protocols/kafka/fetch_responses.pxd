# C declarations of fetch_responses.py for the other compiled modules.


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
    cdef bytes _entry
    cdef bytearray _out
    cdef list _parts
    cdef bytes _tags
    cdef int _version

    cdef void _put_length(self, long long length, Py_ssize_t size) except *
    cpdef void begin_topic(self, str name, bytes topic_id, Py_ssize_t entry_count) except *
    cpdef void end_topic(self) except *
    cpdef void add(self, Entry entry) except *
    cpdef list finish(self, long long session_id)
