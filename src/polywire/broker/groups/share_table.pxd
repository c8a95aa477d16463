# C declarations of share_table.py.


cdef class ShareTable:
    cdef public dict _by_group
    cdef public dict _by_partition
    cdef public dict _progress
    cdef public dict _settings
    cdef public object _usage
    cdef public object _views
    cdef public dict _waiting
    cdef public dict groups

    cdef object _advance(self, object change)
    cdef object _charge_records(self, object group, Py_ssize_t added)
