# C-level face of decoder.py for the other compiled modules; it holds declarations only.


cdef class BatchHead:
    cdef readonly Py_ssize_t end
    cdef readonly int codec
    cdef readonly long long record_count
    cdef readonly bint has_append_time
    cdef readonly bint is_transactional
    cdef readonly long long first_time_ms
    cdef readonly long long max_time_ms
    cdef readonly long long producer_id
    cdef readonly int producer_epoch
    cdef readonly long long base_sequence


cdef class Built:
    cdef readonly object batch
    cdef readonly long long max_time_ms
    cdef readonly long long null_keys


cpdef BatchHead check_batch(object records, long long bytes_max=*)
cpdef Built build(object plain, Py_ssize_t start, Py_ssize_t stop, BatchHead head, bint keep_times=*, bytearray deltas=*)
