// What a step left for the next one is put back to what was there before, where one of its means is not finite. All
// threads look at the norms of its messages and do nothing else if these are finite: then nothing is read or written.

constexpr u32 kRestoreThreads = 256;
constexpr u64 kInfinite = 0x7ff0000000000000ull;  // the bits of a double without its sign

// restore.py packs the same fields.
struct Region {
    u64 from, to, words;  // of 4 bytes
};
struct Restore {
    u64 norms, count;  // double[count], none of them negative
    u64 regions;
    Region region[1];  // as many as that
};

DEVICE void restore(const Args& args) {
    const Restore& a = *(const Restore*)&args;
    const u64* norms = pointer<const u64>(a.norms);
    bool finite = true;
    for (u64 at = 0; at < a.count; at++) finite &= norms[at] < kInfinite;
    if (finite) return;
    for (u64 number = 0; number < a.regions; number++) {
        const Region& r = (&a.region[0])[number];
        const u32* from = pointer<const u32>(r.from);
        u32* to = pointer<u32>(r.to);
        u64 first = (u64)blockIdx.x * kRestoreThreads + threadIdx.x, stride = (u64)gridDim.x * kRestoreThreads;
        for (u64 at = first; at < r.words; at += stride) to[at] = from[at];
    }
}
