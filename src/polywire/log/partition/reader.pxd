# C declarations of reader.py.

from polywire.log.partition.partition cimport FilePartition


cdef class SlotsPin:
    cdef list _slots
    cdef object _unpinned


cdef class SealedRead:
    cdef readonly long long at
    cdef readonly long long bytes_left
    cdef readonly object bytes_max
    cdef readonly list chunks
    cdef readonly object end
    cdef readonly object offset
    cdef readonly FilePartition partition
    cdef public object then


cdef class Reader:
    cdef public object _cold
    cdef public long _fetching
    cdef object _journal
    cdef object _segments
    cdef public object _worker
    cdef public object epoch
    cdef public dict published
    cdef public object root
    cdef public object unpinned

    cdef object _check_open(self)
    cdef Py_ssize_t _warm_stop(self, FilePartition partition, Py_ssize_t start, Py_ssize_t stop) except -1
    cdef object _read_tail(
        self, FilePartition partition, Py_ssize_t start, Py_ssize_t stop, long long size, object before
    )
