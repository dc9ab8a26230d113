// What each mode maps a value to: floors, q(x) of docs/format.md, and how many bits of it go through the lanes.

// What a floor is made of. Loading it and making it are apart, so that the memory may take its time.
struct FloorInput {
    u32 first, second;
};

template <int FLOOR>
DEVICE FloorInput load_floor(const Tensor& t, u64 i) {
    if (FLOOR == kInt8Floor) return {(u32)(int)pointer<const i8>(t.floors)[i], 0};
    if (FLOOR == kThetaFloor) return {pointer<const u32>(t.floors)[i], 0};
    if (FLOOR == kSecondFloor) return {pointer<const u32>(t.floors)[i], pointer<const u32>(t.second)[i]};
    return {0, 0};
}

template <int FLOOR>
DEVICE int make_floor(FloorInput in, const Tensor& t, int shift) {
    if (FLOOR == kInt8Floor) return (int)in.first == -128 ? kExact : min_int((int)in.first + shift, kCoarsest);
    int theta = (in.first >> 23) & 255;
    int f = theta + t.c0;
    if (FLOOR == kSecondFloor) f += max_int((int)((in.second >> 23) & 255) + t.c1, t.c2) >> 1;
    return theta == 0 || f < -127 ? kExact : min_int(f + shift, kCoarsest);
}

// A mapped value and its lane bits; `width` is 0 for zeros.
struct Mapped {
    u32 bits;
    int width;
};

DEVICE u32 quiet(u32 v) { return (v << 1) > 0xff000000u ? (v & 0x80000000u) | 0x7fc00000u : v; }

DEVICE Mapped map_near(u32 v, int f) {
    int e = (v >> 23) & 255;
    Mapped q = {v, 24};
    if (e - 127 - f < 23) {  // adding 2^(f+23) makes the last place 2^f; then rounding is the adder's work
        float grid = __uint_as_float((u32)(f + 150) << 23);
        u32 rounded = __float_as_uint(__fsub_rn(__fadd_rn(__uint_as_float(v & 0x7fffffffu), grid), grid));
        q.bits = rounded | (v & 0x80000000u);
        q.width = (int)(rounded >> 23) - 126 - f;
        if (rounded == 0) e = 0;
    } else {
        q.bits = quiet(v);
    }
    if (e == 0) q = {0, 0};
    return q;
}

DEVICE int paper_level(int e, int reach) {
    int span = reach - (e - 127) - 1;
    return e == 255 ? 0 : (span >= 6) + (span >= 12) + (span >= 18);
}

DEVICE Mapped map_paper(u32 v, int reach) {
    int e = (v >> 23) & 255;
    if (e == 0) return {0, 0};
    int cut = 6 * paper_level(e, reach);
    return {quiet(v) & (kAll << cut), 24 - cut};
}

template <int CODING>
DEVICE Mapped map_lanes(u32 v, int f) { return CODING == kPaper ? map_paper(v, f) : map_near(v, f); }

// keep=k: v becomes (v + up + (v >> cut & odd)) & mask where that stays finite; the host makes these four from k.
DEVICE u32 map_keep(u32 v, const Args& a) {
    u32 magnitude = v & 0x7fffffffu;
    u32 r = (magnitude + (u32)a.up + ((magnitude >> a.cut) & (u32)a.odd)) & (u32)a.mask;
    if (r >= 0x7f800000u) r = magnitude < 0x7f800000u ? magnitude & (u32)a.mask : quiet(magnitude);
    return magnitude < 0x800000u ? 0 : r | (v & 0x80000000u);
}

template <class F, bool KEEP>
DEVICE u32 map_fixed(u32 v, const Args& a) { return KEEP ? map_keep(v, a) : v; }

// How many mantissa bits of a value with that exponent and floor are kept (near mode).
DEVICE int kept_bits(int e, int f) { return e == 255 ? 23 : max_int(0, min_int(23, e - 127 - f)); }

// How far an exponent lies above the floor: d of the sparse form.
DEVICE int distance(int e, int f) { return e - 127 - max_int(f, -128); }

// --- Four neighbours at a time -------------------------------------------------------------------------------------

struct Four {
    u32 v[4];
};

template <class F>
DEVICE Four load_four(const typename F::Bits* x, u32 i, bool aligned) {
    Four four;
    if (aligned && F::kItem == 4) {
        uint4 w = *(const uint4*)(x + i);
        four = {{w.x, w.y, w.z, w.w}};
    } else if (aligned) {
        uint2 w = *(const uint2*)(x + i);
        four = {{w.x & 0xffff, w.x >> 16, w.y & 0xffff, w.y >> 16}};
    } else {
        for (int c = 0; c < 4; c++) four.v[c] = x[i + c];
    }
    return four;
}

template <class F>
DEVICE void store_four(typename F::Bits* x, u32 i, Four f, bool aligned) {
    if (aligned && F::kItem == 4)
        *(uint4*)(x + i) = make_uint4(f.v[0], f.v[1], f.v[2], f.v[3]);
    else if (aligned)
        *(uint2*)(x + i) = make_uint2(f.v[0] | f.v[1] << 16, f.v[2] | f.v[3] << 16);
    else
        for (int c = 0; c < 4; c++) x[i + c] = (typename F::Bits)f.v[c];
}

template <class F>
DEVICE bool can_load_four(const void* x) { return (u64)x % (4 * F::kItem) == 0; }

// Byte J of four words as one word.
template <int J>
DEVICE u32 bytes_of(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, J | (4 + J) << 4), __byte_perm(c, d, J | (4 + J) << 4), 0x5410);
}
