// The stages of block.h in plain loops, for instruction sets that have nothing faster. Included like values.h.

inline void compress_bytes(const uint8_t* from, const uint8_t* exponent, int n, uint8_t* to) {
    for (int i = 0; i < n; i++) {
        *to = from[i];
        to += exponent[i] != 0;
    }
}

inline void expand_bytes(const uint8_t* from, int count, const uint8_t* exponent, int n, uint8_t* to) {
    const uint8_t* end = from + count;
    for (int i = 0; i < n; i++) {
        to[i] = exponent[i] && from < end ? *from : 0;
        from += exponent[i] != 0;
    }
}

inline void copy_out(void* out, const void* values, size_t bytes, bool) { std::memcpy(out, values, bytes); }

using plain::find_nonzero;

#include "values.h"

inline void make_floors(const FloorSource& from, int first, int n, int8_t* out) {
    floors(*from.rule, from.start + uint64_t(first), n, from.shift, out);
}

inline bool round_near(const void*, int, const int8_t*, uint32_t*) { return false; }
inline int sample_near(const BlockIn&, uint8_t*) { return 0; }
inline int decode_near(const BlockData*, int, const Target*, const Ahead&, uint32_t*) { return 0; }
inline bool encode_near(const BlockIn&, uint8_t*, Scratch&, BlockOut*) { return false; }
inline Split split_values(const BlockIn& in, Scratch& scratch, uint8_t*) { return split_values_plain(in, scratch); }
inline bool join_bytes(const uint8_t*, const uint8_t* const*, int, int, const Target&) { return false; }
inline bool join_lanes(const Scratch&, int, const Target&) { return false; }

inline int decode_dense_lanes(const LaneOutput* lanes, int count) {
    for (int i = 0; i < count; i++)
        if (int error = plain::decode_lanes(lanes[i])) return error;
    return 0;
}
