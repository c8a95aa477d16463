# C declarations of write_batch.py for the other compiled modules.

from polywire.log.journal.group cimport GroupHead
from polywire.log.partition.partition cimport FilePartition


cdef class Draft:
    cdef public bint all_synced
    cdef public unsigned long long epoch
    cdef public GroupHead head
    cdef public list indexed
    cdef public long long now_us
    cdef public bint only_appends
    cdef public list parts
    cdef public list placed
    cdef public bint removes
    cdef public object state
    cdef public bint state_changed
    cdef public list synced
    cdef public list then
    cdef public list written

    cpdef object begin(self, long long now_us)
    cpdef object notify(self, object level, object done, object result)
    cdef object notify_all(self, object owners, object counts, long long offset)
    cdef long long number(self, FilePartition partition, object batch) except? -1
    cpdef object settle(self, object contents, long long serial, long long start)


cdef class Appends:
    cdef list _entries
    cdef public list items
    cdef public FilePartition partition

    cpdef object prepare(self)
    cpdef object enter(self, Draft draft)


cdef class WriteBatch:
    cdef public list steps
    cdef public Py_ssize_t size
    cdef public Py_ssize_t granted
    cdef public list open

    cpdef object close(self)
