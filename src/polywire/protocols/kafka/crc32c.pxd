# C-level face of crc32c.py for the other compiled modules; it holds declarations only.

cdef unsigned int crc32c_raw(const unsigned char *p, Py_ssize_t at, Py_ssize_t size) noexcept nogil
