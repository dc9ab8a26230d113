// What exchanges do with the pieces of a message beside coding them: rounding a rank's own values to what others would
// decode of them, and putting bodies where they are sent from. A group of threads takes 4096 values after the other.

constexpr int kPieceThreads = 256;  // of a group

enum { kAsTheyAre = 0, kKept = 1, kOnGrid = 2 };  // what values become

template <int ROUNDING, int FLOOR>
DEVICE u32 rounded(u32 v, const Args& a, const Source<Float32, FLOOR>& source, u32 i) {
    if (ROUNDING == kKept) return map_keep(v, a);
    if (ROUNDING == kOnGrid) return map_near(v, floor_at(source, i)).bits;
    return v;
}

// Rounds `values`. They go to `addend` (0: nowhere), added to what is there if `a.small`; what rounding takes from them,
// divided by the float in `a.limit`, to `body` (0: nowhere).
template <int ROUNDING, int FLOOR>
DEVICE void pieces_round(const Args& a) {
    float unit = __uint_as_float((u32)a.limit);
    for (u32 group = blockIdx.x; group < (u32)a.groups; group += gridDim.x) {
        const Tensor& t = a.tensor[tensor_of_group(a, group)];
        u64 start = (u64)(group - t.first_group) * kBlock;
        int n = values_in(t, start);
        Source<Float32, FLOOR> source(a, t, start);
        u32* out = pointer<u32>(t.addend) + start;
        float* lost = pointer<float>(t.body) + start;
        for (int i = (int)threadIdx.x; i < n; i += kPieceThreads) {
            u32 v = source.x[i], q = rounded<ROUNDING, FLOOR>(v, a, source, (u32)i);
            if (t.addend) out[i] = a.small ? Sum<Float32>::of(out[i], q) : q;
            if (t.body) {
                float rest = __fsub_rn(__uint_as_float(v), __uint_as_float(q));
                lost[i] = unit == 1 ? rest : __fdiv_rn(rest, unit);
            }
        }
    }
}

// Copies `numel` words from `values` to `body`, which may lie in the host's memory.
DEVICE void pieces_copy(const Args& a) {
    for (u32 group = blockIdx.x; group < (u32)a.groups; group += gridDim.x) {
        const Tensor& t = a.tensor[tensor_of_group(a, group)];
        u64 start = (u64)(group - t.first_group) * kBlock;
        int n = values_in(t, start);
        const u32* from = pointer<const u32>(t.values) + start;
        u32* to = pointer<u32>(t.body) + start;
        for (int i = (int)threadIdx.x; i < n; i += kPieceThreads) to[i] = from[i];
    }
}
