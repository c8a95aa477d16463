# C declarations of check.py for the other compiled modules.

cdef int sizes_fit(const unsigned char *p, const long long *places, Py_ssize_t count) noexcept nogil
cdef long long flagged(const unsigned char *p, Py_ssize_t at, Py_ssize_t count, int bit) noexcept nogil
cpdef Py_ssize_t validate(object batch, Py_ssize_t at=*) except? -1
