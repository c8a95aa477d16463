# C declarations of partition.py for the other compiled modules.

from polywire.log.partition.tail_index cimport TailIndex


cdef class FilePartition:
    cdef object _packed_epochs
    cdef object _reader
    cdef public long long clean_offset
    cdef public object compression
    cdef public bint ended
    cdef public object epoch_numbers
    cdef public object epoch_offsets
    cdef public long long first_offset
    cdef public bint hides_unsynced
    cdef public object incarnation
    cdef public long long last_append_time_us
    cdef public unsigned long long last_epoch
    cdef public long long next_address
    cdef public long long next_offset
    cdef public bint opened
    cdef public object pending
    cdef public object published
    cdef public object runs
    cdef public long long sealed_bytes
    cdef public long long synced_offset
    cdef public TailIndex tail
    cdef public long long tail_bytes
    cdef public dict wakes

    cpdef long long readable_end(self) except? -1
    cpdef object check_range(self, object offset)
