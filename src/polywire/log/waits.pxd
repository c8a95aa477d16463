# C declarations of waits.py for the other compiled modules.

from polywire.log.callbacks cimport Notifications
from polywire.log.partition.partition cimport FilePartition


cdef class Waits:
    cdef object _loop
    cdef Notifications _notifications
    cdef public long long count

    cpdef object wake_due(self, FilePartition partition)


cdef class Wait:
    cdef FilePartition _partition
    cdef Waits _waits
    cdef object _wake
    cdef public bint is_due
    cdef public object offset

    cpdef bint leave(self) except -1
    cpdef object cancel(self)
