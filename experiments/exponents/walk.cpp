// Two plain decoders of one Huffman stream, to compare with: one walks the tree bit by bit, one looks codes up.
// Both write what gradzip's decoder writes: float32 values with the exponents decoded and nothing else.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kLimit = 8;

struct Reader {
    const uint8_t* next;
    uint64_t bits = 0;
    int count = 0;

    void fill() {  // the buffer behind the stream has 8 bytes to spare
        uint64_t word;
        std::memcpy(&word, next, 8);
        bits |= word << count;
        next += (63 - count) >> 3;
        count |= 56;
    }
    void skip(int n) {
        bits >>= n;
        count -= n;
    }
};

uint32_t as_float(unsigned exponent) { return exponent << 23; }

}  // namespace

// codes are bit-reversed, so that a code's first bit is its lowest; lengths are 1 to 8. Returns the bytes written.
extern "C" size_t pack(const uint8_t* symbols, size_t n, const uint32_t* codes, const uint32_t* lengths, uint8_t* out) {
    uint8_t* start = out;
    uint64_t bits = 0;
    int count = 0;
    for (size_t i = 0; i < n; i++) {
        bits |= uint64_t(codes[symbols[i]]) << count;
        count += int(lengths[symbols[i]]);
        for (; count >= 8; count -= 8, bits >>= 8) *out++ = uint8_t(bits);
    }
    *out++ = uint8_t(bits);
    return size_t(out - start);
}

extern "C" void walk(const uint8_t* stream, size_t n, const uint32_t* codes, const uint32_t* lengths, uint32_t* out) {
    struct Node {
        int16_t child[2] = {-1, -1};
        int16_t symbol = -1;
    };
    std::vector<Node> tree(1);
    for (int symbol = 0; symbol < 256; symbol++) {
        int at = 0;
        for (uint32_t depth = 0; depth < lengths[symbol]; depth++) {
            int bit = codes[symbol] >> depth & 1;
            if (tree[at].child[bit] < 0) {
                tree[at].child[bit] = int16_t(tree.size());
                tree.emplace_back();
            }
            at = tree[at].child[bit];
        }
        if (lengths[symbol]) tree[at].symbol = int16_t(symbol);
    }
    Reader in{stream};
    for (size_t i = 0; i < n; i++) {
        in.fill();
        int at = 0;
        while (tree[at].symbol < 0) {
            at = tree[at].child[in.bits & 1];
            in.skip(1);
        }
        out[i] = as_float(unsigned(tree[at].symbol));
    }
}

extern "C" void look_up(const uint8_t* stream, size_t n, const uint32_t* codes, const uint32_t* lengths, uint32_t* out) {
    struct Entry {
        uint8_t symbol, length;
    } table[1 << kLimit] = {};
    for (int symbol = 0; symbol < 256; symbol++) {
        if (!lengths[symbol]) continue;
        for (uint32_t i = codes[symbol]; i < 1 << kLimit; i += 1u << lengths[symbol])
            table[i] = {uint8_t(symbol), uint8_t(lengths[symbol])};
    }
    Reader in{stream};
    for (size_t i = 0; i < n; i++) {
        in.fill();
        Entry entry = table[in.bits & ((1 << kLimit) - 1)];
        out[i] = as_float(entry.symbol);
        in.skip(entry.length);
    }
}
