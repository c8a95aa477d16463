# C declarations of structure_encoder.py for the other compiled modules.


cdef class Writer:
    cdef bytearray out
    cdef unsigned char *p
    cdef Py_ssize_t at
    cdef Py_ssize_t size
    cdef list cuts
    cdef Py_ssize_t outside


cdef void put(Writer w, long long x, int size) except *
cdef void put_length(Writer w, long long length, bint flexible, int size) except *
cdef void put_raw(Writer w, object data) except *
cdef void put_records(Writer w, object data, bint flexible) except *
cdef list finish(Writer w)
