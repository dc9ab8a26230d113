// BLAKE2b (RFC 7693) without a key, in digests of 8 bytes: what random draws begin with, one for each name of a message.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gradzip.h"

namespace gz {
namespace {

constexpr uint64_t kStart[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
constexpr uint64_t kBytes = 128;  // of a block

inline uint64_t turned(uint64_t x, int by) { return x >> by | x << (64 - by); }

inline void mix(uint64_t* v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = turned(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = turned(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 63);
}

void compress(uint64_t* h, const uint8_t* block, uint64_t bytes_so_far, bool last) {
    uint64_t m[16], v[16];
    for (int i = 0; i < 16; i++) {
        m[i] = 0;
        for (int byte = 7; byte >= 0; byte--) m[i] = m[i] << 8 | block[8 * i + byte];
    }
    std::copy(h, h + 8, v);
    std::copy(kStart, kStart + 8, v + 8);
    v[12] ^= bytes_so_far;
    if (last) v[14] = ~v[14];
    for (int round = 0; round < 12; round++) {
        const uint8_t* s = kOrder[round % 10];
        mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
        mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
        mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
        mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
        mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
        mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
        mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
        mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

}  // namespace
}  // namespace gz

extern "C" void gz_hash_names(const uint8_t* prefix, uint64_t prefix_size, const uint8_t* names, const uint64_t* sizes,
                              uint64_t count, uint64_t* digests) {
    using namespace gz;
    for (uint64_t number = 0; number < count; number++) {
        const uint64_t size = prefix_size + sizes[number];
        uint64_t h[8], at = 0;
        std::copy(kStart, kStart + 8, h);
        h[0] ^= 0x01010000 ^ 8;
        do {
            uint8_t block[kBytes] = {};
            const uint64_t here = std::min(kBytes, size - at), of_prefix = at < prefix_size ? std::min(here, prefix_size - at) : 0;
            if (of_prefix) std::memcpy(block, prefix + at, size_t(of_prefix));
            if (here > of_prefix) std::memcpy(block + of_prefix, names + (at + of_prefix - prefix_size), size_t(here - of_prefix));
            at += here;
            compress(h, block, at, at == size);
        } while (at < size);
        digests[number] = h[0];
        names += sizes[number];
    }
}
