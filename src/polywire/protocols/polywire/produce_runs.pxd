# C declarations of produce_runs.py for the other compiled modules.

cdef bytes encode_one(
    unsigned int correlation, unsigned int partition, unsigned long long base_offset, unsigned int record_count
)
cdef Py_ssize_t short_bytes(memoryview data, Py_ssize_t at) except? -1
