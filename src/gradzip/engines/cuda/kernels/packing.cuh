// Values of few bits for other codecs: 8 bytes, each a value of `a.limit` < 8 bits, become as many bytes as a value has bits,
// and back. Bits fill bytes from the lowest up; codecs/packing.py does the same with torch's operations.

template <class Work>
DEVICE void for_each_eight(const Tensor& t, Work work) {
    for (u64 group = (u64)blockIdx.x * 256 + threadIdx.x; 8 * group < t.numel; group += (u64)gridDim.x * 256)
        work(group, t.numel - 8 * group < 8 ? (u32)(t.numel - 8 * group) : 8u);
}

// From `values` to `body`.
DEVICE void pack_bits(const Args& a) {
    const Tensor& t = a.tensor[0];
    const u8* values = pointer<const u8>(t.values);
    u8* packed = pointer<u8>(t.body);
    u32 bits = (u32)a.limit;
    bool aligned = t.values % 8 == 0;
    for_each_eight(t, [&](u64 group, u32 count) {
        u64 eight = 0, word = 0;
        if (aligned && count == 8) eight = *(const u64*)(values + 8 * group);
        else
            for (u32 k = 0; k < count; k++) eight |= (u64)values[8 * group + k] << 8 * k;
        for (u32 k = 0; k < 8; k++) word |= ((eight >> 8 * k) & 255) << bits * k;
        for (u32 j = 0; 8 * j < count * bits; j++) packed[bits * group + j] = (u8)(word >> 8 * j);
    });
}

// From `body` to `values`.
DEVICE void unpack_bits(const Args& a) {
    const Tensor& t = a.tensor[0];
    const u8* packed = pointer<const u8>(t.body);
    u8* values = pointer<u8>(t.values);
    u32 bits = (u32)a.limit;
    bool aligned = t.values % 8 == 0;
    for_each_eight(t, [&](u64 group, u32 count) {
        u64 eight = 0, word = 0;
        for (u32 j = 0; 8 * j < count * bits; j++) word |= (u64)packed[bits * group + j] << 8 * j;
        for (u32 k = 0; k < 8; k++) eight |= ((word >> bits * k) & ((1u << bits) - 1)) << 8 * k;
        if (aligned && count == 8) *(u64*)(values + 8 * group) = eight;
        else
            for (u32 k = 0; k < count; k++) values[8 * group + k] = (u8)(eight >> 8 * k);
    });
}
