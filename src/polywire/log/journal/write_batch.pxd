# C declarations of write_batch.py for the other compiled modules.


cdef class Draft:
    cdef public object all_synced
    cdef public object epoch
    cdef public object head
    cdef public list indexed
    cdef public object now_us
    cdef public bint only_appends
    cdef public list parts
    cdef public list placed
    cdef public bint removes
    cdef public object state
    cdef public bint state_changed
    cdef public list synced
    cdef public list then
    cdef public list written

    cpdef object notify(self, object level, object done, object result)
    cdef object notify_all(self, object owners, object counts, long long offset)
    cdef long long number(self, object partition, object batch) except? -1


cdef class Appends:
    cdef list _entries
    cdef public list items
    cdef public object partition


cdef class WriteBatch:
    cdef public list steps
    cdef public Py_ssize_t size
    cdef public Py_ssize_t granted
    cdef public list open
