# C declarations of runs.py for the other compiled modules.

from polywire.records.memory cimport Lent


cdef class Runs:
    cdef list sources  # of Lent
    cdef list kept  # owners of the memory behind the pointers
    cdef long long *triples  # source, start, stop
    cdef long long *layouts  # 54 numbers a source
    cdef long long *places  # the layout of the batch being built
    cdef Py_ssize_t run_count
    cdef Py_ssize_t count  # records of all runs
    cdef bint deltas  # offsets and addresses go on from run to run, with the holes of compaction
    cdef bint holes  # offsets and addresses stay what they are in the one source
    cdef long long lead_offset  # offsets before the source's first record that the batch covers
    cdef long long lead_address
    cdef bint sequences  # the producer's sequences do not stay consecutive
    cdef long long offset_span
    cdef long long address_span
    cdef unsigned char **bases  # where the sources begin
    cdef unsigned char *target  # where the batch being built begins
    cdef Lent batch


cdef Runs open_sources(object batches)
cdef long long *zeros(Runs runs, Py_ssize_t count) except *
cdef void set_runs(Runs runs, long long *triples, Py_ssize_t run_count) except *
cdef bytearray concatenate(Runs runs)
cdef long long offset_delta(const unsigned char *p, long long deltas, long long index) noexcept nogil
cdef long long address_delta(const unsigned char *p, const long long *layouts, long long base, long long index) noexcept nogil
