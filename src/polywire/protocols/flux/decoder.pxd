# C-level face of codec.py for the other compiled modules; it holds declarations only.

cdef Py_ssize_t after_character(const unsigned char[::1] data, Py_ssize_t i, Py_ssize_t stop) noexcept nogil
