# C declarations of share_reading.py for the other compiled modules.

from polywire.broker.groups.share cimport SharePartition


cdef class Waiting:
    cdef public Reading _reading
    cdef public object member
    cdef public object wake


cdef class Reading:
    cdef public object counts
    cdef public object due
    cdef public object group
    cdef public bint is_waking
    cdef public object keys
    cdef public object log_wait
    cdef public object partition
    cdef public SharePartition share
    cdef public object timer
    cdef public double timer_at
    cdef public dict waiting
