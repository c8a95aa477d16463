# Inlined access to the fields of a stored batch's header (decision 0101) for the other compiled modules. The batch begins at ``at``, and the
# memory at ``p`` contains its whole header.

from polywire.records.memory cimport load_i64, load_u32, load_u64


cdef inline unsigned int load_length(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_u32(p, at + 4)


cdef inline unsigned int load_flags(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_u32(p, at + 8)


cdef inline unsigned int load_columns(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_u32(p, at + 12)


cdef inline long long load_partition(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_i64(p, at + 16)


cdef inline unsigned int load_epoch(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_u32(p, at + 24)


cdef inline unsigned int load_record_count(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_u32(p, at + 28)


cdef inline long long load_base_offset(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_i64(p, at + 32)


cdef inline long long load_base_address(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_i64(p, at + 40)


cdef inline long long load_append_time_us(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_i64(p, at + 48)


cdef inline long long load_producer_epoch(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_i64(p, at + 56)


cdef inline long long load_base_sequence(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_i64(p, at + 64)


cdef inline unsigned int load_address_span(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_u32(p, at + 80)


cdef inline unsigned int load_offset_span(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_u32(p, at + 84)


cdef inline unsigned long long load_header_checksum(const unsigned char *p, Py_ssize_t at) noexcept nogil:
    return load_u64(p, at + 96)
