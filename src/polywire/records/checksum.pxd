# C declarations of checksum.py for the other compiled modules.

cdef unsigned long long xxh64_raw(const unsigned char *p, Py_ssize_t at, Py_ssize_t size) noexcept nogil
cdef unsigned int crc32_raw(const unsigned char *p, Py_ssize_t at, Py_ssize_t size) noexcept nogil
