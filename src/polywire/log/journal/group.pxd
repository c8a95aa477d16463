# C declarations of group.py for the other compiled modules.

from polywire.records.memory cimport Lent


cdef class GroupHead:
    cdef bytearray _data
    cdef Lent _lent
    cdef unsigned long long _seed
    cdef public long long address_span
    cdef public unsigned long long checksum
    cdef public Py_ssize_t count
    cdef public long long offset_span
    cdef public Py_ssize_t payload
    cdef public bint producers

    cdef void _grow(self, Py_ssize_t capacity)
    cdef void _enter(
        self,
        unsigned int kind,
        Py_ssize_t length,
        unsigned long long partition,
        unsigned long long argument,
        unsigned long long checksum,
    )
    cpdef object clear(self)
    cpdef bytearray batch(
        self,
        object batch,
        unsigned long long partition,
        unsigned long long epoch,
        unsigned long long base_offset,
        unsigned long long base_address,
        long long time_us,
    )
    cpdef bytes finish(
        self,
        unsigned long long start,
        unsigned long long sequence,
        unsigned long long synced,
        unsigned long long previous,
        long long time_us,
    )
