// Frames of the codec noise: levels, blocks, notches, sums of ranks; and its entry points of gradzip.h.
#include "noise.h"

#include "body.h"
#include "float_mode.h"

namespace gz {
namespace noise {

namespace {

Table make_table(int number) {
    uint8_t length[256];
    for (int i = 0; i < 256; i++) length[i] = uint8_t(kLengths[number][i / 2] >> (i % 2 * 4) & 15);
    Table t{};
    uint32_t code = 0;
    int last = 0;
    for (int l = 1; l <= kLimit; l++) {
        for (int pair = 0; pair < 256; pair++) {
            if (length[pair] != l) continue;
            code <<= l - last;
            last = l;
            uint32_t reversed = 0;
            for (int b = 0; b < l; b++) reversed |= (code >> b & 1) << (l - 1 - b);
            t.low[pair] = uint8_t(reversed);
            t.high[pair] = uint8_t(uint32_t(l) << 4 | reversed >> 8);
            t.code[pair] = uint16_t(reversed);
            t.length[pair] = uint8_t(l);
            for (uint32_t rest = 0; rest < 1u << (kLimit - l); rest++) t.entry[reversed | rest << l] = uint16_t(l | pair << 8);
            code++;
        }
    }
    return t;
}

}  // namespace

const Table& table(int number) {
    static const std::unique_ptr<Table[]> all = [] {
        std::unique_ptr<Table[]> made(new Table[kTables]);
        for (int i = 0; i < kTables; i++) made[i] = make_table(i);
        return made;
    }();
    return all[number];
}

namespace {

namespace any {  // for the few values that no instruction set takes
#include "noise_plain.h"
}  // namespace any
using any::rounded;

constexpr uint64_t kHeader = 24;  // of a frame without a checksum
constexpr int kCodec = 17, kVersion = 1;

const Kernels* kernels() {
#if !defined(GRADZIP_NO_SIMD)
    const char* name = gz::kernels()->name;
#if defined(__aarch64__)
    if (std::strcmp(name, "neon") == 0) return neon_kernels();
#else
    if (std::strcmp(name, "avx512") == 0) return avx512_kernels();
    if (std::strcmp(name, "avx2") == 0) return avx2_kernels();
#endif
#endif
    return scalar_kernels();
}

Work& work() {
    static thread_local std::unique_ptr<Work> room(new Work);
    return *room;
}

float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// --- Levels ---

constexpr float kSmallestLevel = 0x1p-126f, kLargestLevel = 0x1.fffffep127f;

float coarser(float level, int notch) {
    static const float quarter[4] = {1.0f, 0x1.306fep0f, 0x1.6a09e6p0f, 0x1.ae89fap0f};  // 2^(notch / 4), rounded
    float factor = quarter[notch % 4];
    for (int i = 0; i < notch / 4; i++) factor *= 2;
    const float product = level * factor;
    return product > kLargestLevel ? kLargestLevel : product;
}

float level_of_sum(const float* levels, uint64_t world) {
    double total = 0;
    for (uint64_t i = 0; i < world; i++) total += double(levels[i]) * double(levels[i]);
    if (total != total) return as_float(kNaN);
    if (total == 0) return 0;
    const float level = float(std::sqrt((double(world) + 1) / (2.0 * double(world)) * total));
    return level > kLargestLevel ? kLargestLevel : level < kSmallestLevel ? kSmallestLevel : level;
}

bool valid_level(float level) {
    return (level >= kSmallestLevel && level <= kLargestLevel) || as_bits(level) == 0 || as_bits(level) == kNaN;
}

// --- Where parts lie in a frame ---

struct Span {
    uint64_t part, first;  // values [first, first + n) of a part
    int n, at;             // are those from `at` of the block
};

struct Places {
    std::vector<uint64_t> begin;  // of each part in the frame's sequence of values, and the end
    uint64_t numel = 0;

    Places(const gz_noise_part* parts, uint64_t count) {
        uint64_t at = 0;
        for (uint64_t i = 0; i < count; i++) {
            begin.push_back(at);
            at += padded(parts[i].n);
            numel += parts[i].n;
        }
        begin.push_back(at);
    }
    uint64_t values() const { return begin.back(); }
    uint64_t blocks() const { return (values() + kBlock - 1) / kBlock; }
    int count(uint64_t block) const { return int(std::min<uint64_t>(kBlock, values() - block * kBlock)); }
    uint64_t index_offset() const { return kBodyHead + 4 * (begin.size() - 1); }
    uint64_t blocks_offset() const { return index_offset() + (2 * blocks() + 3) / 4 * 4; }
    uint64_t bound() const { return blocks_offset() + kBlockHead * blocks() + 4 * values(); }

    template <typename Visit>
    void spans(const gz_noise_part* parts, uint64_t block, Visit visit) const {
        const uint64_t from = block * kBlock, to = from + uint64_t(count(block));
        uint64_t i = uint64_t(std::upper_bound(begin.begin(), begin.end() - 1, from) - begin.begin()) - 1;
        for (; i + 1 < begin.size() && begin[i] < to; i++) {
            const uint64_t start = std::max(begin[i], from), end = std::min(begin[i] + parts[i].n, to);
            if (start < end) visit(Span{i, start - begin[i], int(end - start), int(start - from)});
        }
    }
};

// --- Blocks ---

int class_of(uint64_t total, uint64_t count) {
    int number = 0;
    while (number < kClasses - 1 && 256 * total >= kThresholds[number] * count) number++;
    return number;
}

// Head, lengths and lanes around mask and planes, which are in place already. Returns where the lists go.
uint8_t* put_lanes(Work& w, uint8_t* block, int number, bool masked, uint8_t* planes_end) {
    int least = w.length[0], most = least;
    for (int j = 1; j < kLanes; j++) {
        least = std::min(least, w.length[j]);
        most = std::max(most, w.length[j]);
    }
    const int width = most - least < 16 ? 0 : most - least < 256 ? 1 : 2;
    block[0] = uint8_t(number);
    block[1] = uint8_t(width | masked << 2);
    store16(block + 2, unsigned(least));
    uint8_t* to = planes_end;
    for (int j = 0; j < kLanes; j++) {
        const int over = w.length[j] - least;
        if (width == 0) to[j / 2] = uint8_t(j % 2 ? to[j / 2] | over << 4 : over);
        else if (width == 1) to[j] = uint8_t(over);
        else store16(to + 2 * j, unsigned(over));
    }
    to += 8 << width;
    for (int j = 0; j < kLanes; j++) {
        for (int i = 0; i < w.length[j]; i += 32) std::memcpy(to + i, w.lanes[j] + i, 32);  // overruns; the next lane follows
        to += w.length[j];
    }
    return to;
}

// Encodes the block whose integers are in work.q, `count` of them, into `block`, which has kBlockRoom bytes. fill_wide puts
// the same integers as floats into work.wide; it is called where 8 bits do not hold them. Returns the block's bytes.
template <typename FillWide>
int encode_block(Work& w, int count, const Kernels* use, uint8_t* block, FillWide fill_wide) {
    const int total = (count + kRow - 1) / kRow;
    uint64_t coded;
    uint64_t sum = use->scan(w.q, total, &coded);
    if (!coded) return 0;
    const int zero_rows = total - __builtin_popcountll(coded);
    const bool masked = zero_rows >= 2;
    const int rows = masked ? total - zero_rows : total;
    int number = class_of(sum, uint64_t(rows) * kRow);
    const bool wide = number >= kWide;
    uint8_t* planes = block + kBlockHead;
    if (masked) {
        store64(planes, coded);
        planes += 8;
    }
    int escapes = 0;
    if (!wide) {
        const int8_t* q = w.q;
        if (masked) {
            int8_t* next = w.used;
            for (uint64_t left = coded; left; left &= left - 1, next += kRow)
                std::memcpy(next, w.q + __builtin_ctzll(left) * kRow, kRow);
            q = w.used;
        }
        const int low = low_bits(number);
        const Table& code = table(table_of(number));
        escapes = use->pack(q, rows, low, kReaches[table_of(number)], w.pairs, planes, w.escapes);
        use->encode_lanes(w.pairs, rows, code, w);
        planes += rows * low * (kRow / 8);
    } else {
        fill_wide();
        std::fill(w.wide + count, w.wide + total * kRow, 0.0f);
        float* next = w.wide;
        uint64_t magnitudes = 0;
        for (int r = 0; r < total; r++) {
            if (masked && !(coded >> r & 1)) continue;
            std::memmove(next, w.wide + r * kRow, kRow * sizeof(float));
            next += kRow;
        }
        for (int i = 0; i < rows * kRow; i++) {
            const float a = std::fabs(w.wide[i]);
            magnitudes += a <= float(kWideMost) ? uint64_t(a) : uint64_t(kWideMost) + 1;
        }
        number = std::max(kWide, class_of(magnitudes, uint64_t(rows) * kRow));
        const int low = low_bits(number), half = 1 << low >> 1, reach = kReaches[table_of(number)];
        std::memset(planes, 0, size_t(rows * low * (kRow / 8)));
        w.giant_count = 0;
        for (int i = 0; i < rows * kRow; i++) {
            const float f = w.wide[i];
            int v = std::fabs(f) <= float(kWideMost) ? int(f) : kWideMost + 1;  // a first guess at what is no giant
            int h = (v + half) >> low;
            const bool giant = !(std::fabs(f) <= float(kWideMost) && h >= -127 && h <= 127);
            if (giant) {
                h = kGiant;
                w.giants[w.giant_count++] = {i, f};
            } else {
                const int lows = (v + half) & ((1 << low) - 1);
                uint8_t* row = planes + i / kRow * low * (kRow / 8) + i % kRow / 8;
                for (int b = 0; b < low; b++) row[b * (kRow / 8)] = uint8_t(row[b * (kRow / 8)] | (lows >> b & 1) << i % 8);
            }
            const bool out = h < -reach || h > reach;
            const int digit = out ? kEscape : h + reach;
            if (out) w.escapes[escapes++] = uint8_t(h);
            w.pairs[i / 2] = uint8_t(i % 2 ? w.pairs[i / 2] | digit << 4 : digit);
        }
        use->encode_lanes(w.pairs, rows, table(table_of(number)), w);
        planes += rows * low * (kRow / 8);
    }
    uint8_t* to = put_lanes(w, block, number, masked, planes);
    std::memcpy(to, w.escapes, size_t(escapes));
    to += escapes;
    for (int i = 0; i < w.giant_count; i++, to += 4) store32(to, w.giants[i].q != w.giants[i].q ? kNaN : as_bits(w.giants[i].q));
    int size = int(to - block);
    if (size >= kBlockHead + 4 * count) {
        fill_wide();
        block[0] = kRaw;
        block[1] = block[2] = block[3] = 0;
        for (int i = 0; i < count; i++) store32(block + kBlockHead + 4 * i, w.wide[i] != w.wide[i] ? kNaN : as_bits(w.wide[i]));
        size = kBlockHead + 4 * count;
    }
    return size;
}

enum Form { kZeros, kNarrow, kFloats, kBad };

struct Block {
    Form form;
    int error;
};

// Reads a block of `count` values into `to_q` and work.giants, or into work.wide. kOverrun bytes behind it are readable.
Block decode_block(const uint8_t* data, uint64_t size, int count, int8_t* to_q, Work& w, const Kernels* use, Behind& behind) {
    w.giant_count = 0;
    if (size == 0) return {kZeros, 0};
    if (size < kBlockHead) return {kBad, GZ_NOISE_BLOCK};
    const int number = data[0], width = data[1] & 3, base = int(load16(data + 2));
    const bool masked = data[1] >> 2 & 1;
    if (number == kRaw) {
        if (data[1] || base || size != uint64_t(kBlockHead + 4 * count)) return {kBad, GZ_NOISE_RAW};
        for (int i = 0; i < count; i++) w.wide[i] = as_float(load32(data + kBlockHead + 4 * i));
        return {kFloats, 0};
    }
    if (number >= kClasses || data[1] >> 3 || width == 3) return {kBad, GZ_NOISE_BLOCK};
    const int total = (count + kRow - 1) / kRow, low = low_bits(number);
    const uint64_t all = total == 64 ? ~uint64_t(0) : (uint64_t(1) << total) - 1;
    uint64_t coded = all, at = kBlockHead;
    if (masked) {
        if (size < at + 8) return {kBad, GZ_NOISE_LANES};
        coded = load64(data + at);
        at += 8;
        if (!coded || coded & ~all) return {kBad, GZ_NOISE_BLOCK};
    }
    const int rows = __builtin_popcountll(coded);
    const uint64_t planes = at;
    at += uint64_t(rows * low * (kRow / 8));
    if (size < at + (8u << width)) return {kBad, GZ_NOISE_LANES};
    const uint8_t* lane[kLanes];
    int length[kLanes];
    uint64_t place = at + (8u << width);
    for (int j = 0; j < kLanes; j++) {
        length[j] = base + int(width == 0 ? data[at + uint64_t(j / 2)] >> (j % 2 * 4) & 15u
                               : width == 1 ? data[at + uint64_t(j)] : load16(data + at + 2 * uint64_t(j)));
        if (uint64_t(length[j]) > size - place) return {kBad, GZ_NOISE_LANES};
        lane[j] = data + place;
        place += uint64_t(length[j]);
    }
    uint64_t bits[kLanes];
    use->decode_lanes(lane, rows, table(table_of(number)), w.entries, bits, behind);
    for (int j = 0; j < kLanes; j++)
        if ((bits[j] + 7) / 8 != uint64_t(length[j])) return {kBad, GZ_NOISE_LANES};
    const int reach = kReaches[table_of(number)], half = 1 << low >> 1;
    const uint8_t *escape = data + place, *end = data + size;
    if (number < kWide) {
        int8_t* q = rows == total ? to_q : w.used;
        const int escapes = use->unpack(w.entries, rows, low, reach, data + planes, q, w.escaped);
        if (escapes) {
            if (escapes > end - escape) return {kBad, GZ_NOISE_LISTS};
            const uint8_t* giant = escape + escapes;
            int row = 0;
            uint64_t rows_left = coded;
            for (int g = 0; g < 2 * rows; g++) {
                row = __builtin_ctzll(rows_left);
                for (uint64_t left = w.escaped[g]; left; left &= left - 1) {
                    const int i = __builtin_ctzll(left), at_q = 64 * g + i, h = int8_t(*escape++);
                    if (h == kGiant) {
                        if (end - giant < 4) return {kBad, GZ_NOISE_LISTS};
                        w.giants[w.giant_count++] = {row * kRow + g % 2 * 64 + i, as_float(load32(giant))};
                        giant += 4;
                        q[at_q] = 0;
                        continue;
                    }
                    const int lows = (q[at_q] + half + (reach << low)) & ((1 << low) - 1);
                    const int v = h * (1 << low) + lows - half;
                    if (v < -kNarrowMost || v > kNarrowMost) return {kBad, GZ_NOISE_LISTS};
                    q[at_q] = int8_t(v);
                }
                if (g % 2) rows_left &= rows_left - 1;
            }
            escape = giant;
        }
        if (escape != end) return {kBad, GZ_NOISE_LISTS};
        if (rows != total) {
            std::memset(to_q, 0, size_t(total * kRow));
            const int8_t* next = w.used;
            for (uint64_t left = coded; left; left &= left - 1, next += kRow) std::memcpy(to_q + __builtin_ctzll(left) * kRow, next, kRow);
        }
        return {kNarrow, 0};
    }
    uint64_t escapes = 0;
    for (int i = 0; i < rows * kRow; i++) escapes += (w.entries[i / 2] >> (8 + i % 2 * 4) & 15) == kEscape;
    if (escapes > uint64_t(end - escape)) return {kBad, GZ_NOISE_LISTS};
    const uint8_t* giant = escape + escapes;
    std::memset(w.wide, 0, sizeof w.wide);
    uint64_t rows_left = coded;
    for (int r = 0; r < rows; r++, rows_left &= rows_left - 1) {
        float* to = w.wide + __builtin_ctzll(rows_left) * kRow;
        const uint8_t* plane = data + planes + r * low * (kRow / 8);
        for (int i = 0; i < kRow; i++) {
            int h = int(w.entries[(r * kRow + i) / 2] >> (8 + i % 2 * 4) & 15) - reach;
            if (h == kEscape - reach) {
                h = int8_t(*escape++);
                if (h == kGiant) {
                    if (end - giant < 4) return {kBad, GZ_NOISE_LISTS};
                    to[i] = as_float(load32(giant));
                    giant += 4;
                    continue;
                }
            }
            int lows = 0;
            for (int b = 0; b < low; b++) lows |= (plane[b * (kRow / 8) + i / 8] >> i % 8 & 1) << b;
            to[i] = float(h * (1 << low) + lows - half);
        }
    }
    if (giant != end) return {kBad, GZ_NOISE_LISTS};
    return {kFloats, 0};
}

// --- Frames ---

Rounding rounding_of(const gz_noise_part& part, float level, uint64_t first) {
    const bool used = level != 0 && level == level;
    const uint32_t high = uint32_t(part.key >> 32);
    return {used ? float(1.0 / double(level)) : 0.0f, uint32_t(part.key), high + part.offset, uint32_t(part.start + first),
            part.shape ? part.shape + first : nullptr};
}

void write_head(uint8_t* out, uint64_t parts, int notch, bool poisoned, uint32_t step, uint32_t digest) {
    store32(out, uint32_t(parts));
    store16(out + 4, unsigned(notch));
    store16(out + 6, poisoned ? kPoisoned : 0);
    store32(out + 8, step);
    store32(out + 12, digest);
}

// Writes a body at one notch; false if it does not fit. fetch(span, work) says where the values of a span are.
template <typename Prepare, typename Fetch>
int64_t encode_at(const gz_noise_part* parts, const Places& places, const float* levels, int notch, uint8_t* out, uint64_t room,
                  const Kernels* use, const gz_noise_part* read, Prepare prepare, Fetch fetch, int* error) {
    Work& w = work();
    const uint64_t blocks = places.blocks();
    uint64_t at = places.blocks_offset();
    if (at > room) return -1;
    for (uint64_t i = 0; i + 1 < places.begin.size(); i++) store32(out + kBodyHead + 4 * i, levels[i] != levels[i] ? kNaN : as_bits(levels[i]));
    uint8_t* index = out + places.index_offset();
    std::memset(index, 0, size_t(at - places.index_offset()));
    for (uint64_t block = 0; block < blocks; block++) {
        const int count = places.count(block);
        if ((*error = prepare(block, w))) return -1;
        w.giant_count = 0;
        w.ahead.clear();
        if (read && block + 1 < blocks)
            places.spans(parts, block + 1, [&](const Span& span) {
                const int8_t* shape = parts[span.part].shape;
                w.ahead.add(reinterpret_cast<const uint8_t*>(read[span.part].values + span.first), shape ? shape + span.first : nullptr, span.n);
            });
        int done = 0;
        places.spans(parts, block, [&](const Span& span) {
            if (span.at > done) std::memset(w.q + done, 0, size_t(span.at - done));
            const Rounding how = rounding_of(parts[span.part], coarser(levels[span.part], notch), span.first);
            if (how.scale == 0) std::memset(w.q + span.at, 0, size_t(span.n));
            else use->round(fetch(span, w), span.n, how, span.at, w);
            done = span.at + span.n;
        });
        std::memset(w.q + done, 0, size_t((count + kRow - 1) / kRow * kRow - done));
        const bool in_place = room - at >= kBlockRoom;
        const int size = encode_block(w, count, use, in_place ? out + at : w.block, [&] {
            std::fill(w.wide, w.wide + count, 0.0f);
            places.spans(parts, block, [&](const Span& span) {
                const Rounding how = rounding_of(parts[span.part], coarser(levels[span.part], notch), span.first);
                const uint8_t* x = fetch(span, w);
                if (how.scale != 0)
                    for (int i = 0; i < span.n; i++) w.wide[span.at + i] = rounded(value_at<float>(x, i), how, uint32_t(i));
            });
        });
        if (uint64_t(size) > room - at) return -1;
        if (!in_place) std::memcpy(out + at, w.block, size_t(size));
        store16(index + 2 * block, unsigned(size));
        at += uint64_t(size);
    }
    return int64_t(at);
}

void store_header(uint8_t* out, uint64_t numel, uint64_t body) {
    const uint8_t head[8] = {'G', 'Z', kVersion, kCodec, 0, 0, 0, 0};
    std::memcpy(out, head, sizeof head);
    store64(out + 8, numel);
    store64(out + 16, body);
}

// Writes a frame at the first notch that fits.
template <typename Prepare, typename Fetch>
int64_t encode_frame(gz_noise_frame& frame, const float* levels, bool poisoned, uint32_t step, uint32_t digest, const gz_noise_part* read,
                     Prepare prepare, Fetch fetch) {
    const Places places(frame.parts, frame.count);
    const uint64_t header = frame.framed ? kHeader : 0;
    if (frame.slot < header + std::max<uint64_t>(places.blocks_offset(), kBodyHead)) return GZ_NO_ROOM;
    uint8_t* out = frame.out + header;
    const uint64_t room = frame.slot - header;
    int64_t size = -1;
    frame.notch = 0;
    for (int notch = 0; notch <= kMostNotch && size < 0 && !poisoned; notch += notch < 4 ? 1 : 4) {
        int error = 0;
        size = encode_at(frame.parts, places, levels, notch, out, room, kernels(), read, prepare, fetch, &error);
        if (error) return error;
        if (size >= 0) frame.notch = notch;
    }
    if (size < 0) {
        poisoned = true;
        size = kBodyHead;
    }
    frame.poisoned = poisoned;
    write_head(out, frame.count, frame.notch, poisoned, step, digest);
    if (frame.framed) store_header(frame.out, places.numel, uint64_t(size));
    frame.size = header + uint64_t(size);
    return 0;
}

// A body that is read.
struct Body {
    const uint8_t* data = nullptr;
    uint64_t size = 0;
    int notch = 0;
    bool poisoned = false;
    std::vector<float> levels;     // nominal
    std::vector<uint64_t> offset;  // of each block, and the end

    int read(const uint8_t* from, uint64_t bytes, bool framed, const Places& places, const gz_noise_id* expected) {
        data = from;
        size = bytes;
        if (framed) {
            uint8_t header[kHeader];
            if (size < kHeader) return GZ_TRUNCATED_HEAD;
            const uint64_t body = load64(data + 16);
            store_header(header, places.numel, body);
            if (std::memcmp(header, data, kHeader) || body > size - kHeader) return GZ_BAD_FRAMES;
            data += kHeader;
            size = body;
        }
        const uint64_t parts = places.begin.size() - 1, blocks = places.blocks();
        if (size < kBodyHead) return GZ_TRUNCATED_HEAD;
        notch = int(load16(data + 4));
        const unsigned flags = load16(data + 6);
        poisoned = flags & kPoisoned;
        if (load32(data) != parts || notch > kMostNotch || flags & ~unsigned(kPoisoned)) return GZ_NOISE_HEAD;
        if (expected && (load32(data + 8) != expected->step || load32(data + 12) != expected->digest)) return GZ_NOISE_OTHER;
        levels.assign(parts, as_float(kNaN));
        if (poisoned) return size == kBodyHead ? 0 : GZ_NOISE_HEAD;
        if (size < places.blocks_offset()) return GZ_TRUNCATED_HEAD;
        for (uint64_t i = 0; i < parts; i++) {
            levels[i] = as_float(load32(data + kBodyHead + 4 * i));
            if (!valid_level(levels[i])) return GZ_NOISE_LEVEL;
        }
        const uint8_t* index = data + places.index_offset();
        uint64_t at = places.blocks_offset();
        for (const uint8_t* pad = index + 2 * blocks; pad < data + at; pad++)
            if (*pad) return GZ_BAD_INDEX;
        offset.resize(blocks + 1);
        for (uint64_t i = 0; i < blocks; i++) {
            offset[i] = at;
            at += load16(index + 2 * i);
        }
        offset[blocks] = at;
        return at > size ? GZ_TRUNCATED_BLOCK : at < size ? GZ_TRAILING : 0;
    }
};

void deliver_one(float q, const Target& target, int i) {
    const float power = target.shape ? as_float(uint32_t(127 + target.shape[i]) << 23) : 1.0f;
    float value = q * target.level * power;
    if (value != value) value = as_float(kNaN);
    if (target.squares) {
        if (std::fabs(q) <= float(kNarrowMost)) target.squares->lane[i % 32] += q * power * (q * power);
        else target.squares->large += double(q) * double(power) * (double(q) * double(power));
        target.squares->finite &= std::isfinite(value);
    }
    if (target.delivery == kPut) value *= target.factor;
    if (target.delivery == kAdd) value = value_at<float>(target.out, i) + value;
    if (target.delivery == kDivide) value = value / target.divisor;
    put_value(target.out, i, value);
}

void deliver_constant(float value, const Target& target, int n) {
    for (int i = 0; i < n; i++) put_value(target.out, i, target.delivery == kAdd ? value_at<float>(target.out, i) + value : value);
}

// Adds the squares of a part that is delivered to those of its block.
void add_squares(const Target& target, double* sum) {
    if (!target.squares) return;
    double lane[32];
    std::copy(target.squares->lane, target.squares->lane + 32, lane);
    for (int half = 16; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    *sum += (lane[0] + target.squares->large) * (double(target.level) * double(target.level));
    if (!target.squares->finite) *sum = double(as_float(kNaN));
}

// What is still to be delivered of the block before.
void finish(Behind& behind, const Kernels* use) {
    if (!behind.q) return;
    Target target = behind.target;
    target.out += 4 * behind.done;
    if (target.shape) target.shape += behind.done;
    use->deliver(behind.q + behind.done, kBlock - behind.done, target);
    add_squares(target, behind.sum);
    behind = {};
}

// How a frame is decoded.
struct Decoding {
    Delivery delivery;
    float factor, divisor;
    bool stream;

    static Decoding by(uint32_t divisor, bool stream) {
        if ((divisor & (divisor - 1)) == 0) return {kPut, 1.0f / float(divisor), 1, stream};  // exact, and faster
        return {kDivide, 1, float(divisor), stream};
    }
    static Decoding adding() { return {kAdd, 1, 1, false}; }
};

// One block into the places of its values; to(span) says where those of a span are. A block that goes to one place may be
// left in *behind, for the next call or for finish(); NULL: it is delivered before this returns. The squares of the integers
// times 2^d times level are added to *sum, if it is not NULL; NaN if a value is not finite.
template <typename To>
int decode_to(const Body& body, const gz_noise_part* parts, const Places& places, uint64_t block, const Decoding& how, const Kernels* use,
              Behind* behind, double* sum, To to) {
    Work& w = work();
    Block form{kZeros, 0};
    Behind none{}, &before = behind ? *behind : none;
    int8_t* q = before.q == w.q ? w.other : w.q;
    w.giant_count = 0;
    if (!body.poisoned) {
        const uint8_t* data = body.data + body.offset[block];
        const uint64_t size = body.offset[block + 1] - body.offset[block];
        if (body.size - body.offset[block] < size + kOverrun && size) {  // so that lanes may be read beyond the end
            if (size > kBlockRoom - kOverrun) return GZ_NOISE_BLOCK;
            std::memcpy(w.block, data, size_t(size));
            std::memset(w.block + size, 0, kOverrun);
            data = w.block;
        }
        if (block + 2 < body.offset.size())  // the next one: its lanes are too short for the processor to guess ahead
            for (uint64_t at = body.offset[block + 1]; at < body.offset[block + 2]; at += 64) __builtin_prefetch(body.data + at);
        form = decode_block(data, size, places.count(block), q, w, use, before);
        if (form.form == kBad) return form.error;
        if (form.form == kZeros && how.delivery == kAdd) std::memset(q, 0, sizeof w.q);
    }
    finish(before, use);
    int giant = 0;
    places.spans(parts, block, [&](const Span& span) {
        const gz_noise_part& part = parts[span.part];
        const float nominal = body.levels[span.part];
        const Target target{to(span), part.shape ? part.shape + span.first : nullptr, coarser(nominal, body.notch), how.delivery,
                            how.factor, how.divisor, how.stream, sum ? &w.squares : nullptr};
        if (sum) w.squares = {{}, 0, nominal == nominal};
        while (giant < w.giant_count && w.giants[giant].at < span.at) giant++;  // in a gap
        if (nominal != nominal) {
            deliver_constant(as_float(kNaN), target, span.n);
            return add_squares(target, sum);
        }
        if (nominal == 0) return deliver_constant(0.0f, target, span.n);
        if (form.form == kFloats) {
            for (int i = 0; i < span.n; i++) deliver_one(w.wide[span.at + i], target, i);
            return add_squares(target, sum);
        }
        if (form.form == kZeros && how.delivery != kAdd) {
            std::memset(target.out, 0, size_t(span.n) * 4);
            return;
        }
        if (behind && span.n == kBlock && how.delivery == kPut && !w.giant_count) {
            *behind = {q, target, 0, sum};
            return;
        }
        use->deliver(q + span.at, span.n, target);
        for (; giant < w.giant_count && w.giants[giant].at < span.at + span.n; giant++)
            deliver_one(w.giants[giant].q, target, w.giants[giant].at - span.at);
        add_squares(target, sum);
    });
    return 0;
}

std::vector<uint64_t> shares(uint64_t blocks, int threads) {
    const uint64_t count = std::max<uint64_t>(1, std::min<uint64_t>(uint64_t(std::max(threads, 1)), blocks / 16));
    std::vector<uint64_t> bounds;
    for (uint64_t i = 0; i <= count; i++) bounds.push_back(blocks * i / count);
    return bounds;
}

bool valid_parts(const gz_noise_part* parts, uint64_t count) {
    uint64_t values = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (parts[i].n > uint64_t(1) << 40 || (parts[i].n && !parts[i].values)) return false;
        values += parts[i].n;
        if (values > uint64_t(1) << 40) return false;
    }
    return count <= 0xffffffffu;
}

bool valid_levels(const gz_noise_part* parts, uint64_t count) {
    for (uint64_t i = 0; i < count; i++)
        if (!valid_level(parts[i].level) && parts[i].level == parts[i].level) return false;
    return true;
}

double ordered_sum(std::vector<double> terms) {
    while (terms.size() > 1) {
        std::vector<double> sums;
        for (size_t start = 0; start < terms.size(); start += kSumBlock) {
            double lane[32] = {};
            const size_t end = std::min<size_t>(terms.size(), start + kSumBlock);
            for (size_t i = start; i < end; i++) lane[(i - start) % 32] += terms[i];
            for (int half = 16; half; half /= 2)
                for (int j = 0; j < half; j++) lane[j] += lane[j + half];
            sums.push_back(lane[0]);
        }
        terms.swap(sums);
    }
    return terms.empty() ? 0.0 : terms[0];
}

double finite_squares(const uint8_t* x, int n) {
    double lane[32] = {};
    for (int i = 0; i < n; i++) {
        const double value = value_at<float>(x, i);
        if (std::isfinite(value)) lane[i % 32] += value * value;
    }
    for (int half = 16; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    return lane[0];
}

// The sum of the squares of the finite values of a block; notes whether all are finite.
double squares_of_block(const gz_noise_part& part, uint64_t number, const Kernels* use, int* finite) {
    const uint8_t* x = reinterpret_cast<const uint8_t*>(part.values + number * kSumBlock);
    const int n = int(std::min<uint64_t>(kSumBlock, part.n - number * kSumBlock));
    const double sum = use->squares(x, n);
    if (std::isfinite(sum)) return sum;
    *finite = 0;
    return finite_squares(x, n);
}

void statistics_of(const gz_noise_part& part, gz_noise_statistics* out, int threads, const Kernels* use) {
    const uint64_t blocks = (part.n + kSumBlock - 1) / kSumBlock;
    out->finite = 1;
    if (blocks == 1) {  // models have many of these, and what follows takes as long as they do
        out->squares = squares_of_block(part, 0, use, &out->finite);
    } else {
        std::vector<double> sums(blocks);
        const std::vector<uint64_t> bounds = shares(blocks, threads);
        std::vector<int> finite(bounds.size() - 1, 1);
        run_parts(bounds.size() - 1, [&](size_t k) {
            FloatMode mode;
            for (uint64_t i = bounds[k]; i < bounds[k + 1]; i++) sums[i] = squares_of_block(part, i, use, &finite[k]);
        });
        out->squares = ordered_sum(std::move(sums));
        for (int all : finite) out->finite &= all;
    }
    out->weights = part.shape ? int64_t(use->weights(part.shape, part.n)) : int64_t(part.n) << 24;
}

}  // namespace
}  // namespace noise
}  // namespace gz

using namespace gz;
using namespace gz::noise;

extern "C" {

uint64_t gz_noise_bound(const gz_noise_part* parts, uint64_t count) {
    return kHeader + std::max<uint64_t>(Places(parts, count).bound(), noise::kBodyHead);
}

int64_t gz_noise_statistics_of(const gz_noise_part* parts, uint64_t count, gz_noise_statistics* out, int32_t threads) {
    if (!valid_parts(parts, count)) return GZ_BAD_ARGUMENT;
    FloatMode mode;
    // The last part first: the first ones are then still in the cache when they are encoded.
    for (uint64_t i = count; i-- > 0;) statistics_of(parts[i], out + i, threads, noise::kernels());
    return 0;
}

int64_t gz_noise_shapes(const float* const* second, const uint64_t* n, int8_t* const* shape, uint8_t* found, uint64_t count,
                        int32_t threads) {
    const noise::Kernels* use = noise::kernels();
    const uint64_t shares = std::max<uint64_t>(1, std::min<uint64_t>(uint64_t(std::max(threads, 1)), count));
    run_parts(size_t(shares), [&](size_t k) {
        for (uint64_t i = count * k / shares; i < count * (k + 1) / shares; i++) {
            const uint32_t largest = use->largest(second[i], n[i]);
            found[i] = largest > 0 && largest < 0x7f800000;
            if (found[i]) use->shape(second[i], n[i], largest, shape[i]);
        }
    });
    return 0;
}

int64_t gz_noise_encode(gz_noise_frame* frames, uint64_t count, uint32_t step, uint32_t digest, int32_t threads) {
    for (uint64_t i = 0; i < count; i++)
        if (!valid_parts(frames[i].parts, frames[i].count) || !valid_levels(frames[i].parts, frames[i].count)) return GZ_BAD_ARGUMENT;
    const uint64_t shares = std::max<uint64_t>(1, std::min<uint64_t>(uint64_t(std::max(threads, 1)), count));
    std::vector<int64_t> error(size_t(shares), 0);
    run_parts(size_t(shares), [&](size_t k) {
        FloatMode mode;
        for (uint64_t i = count * k / shares; i < count * (k + 1) / shares && !error[k]; i++) {
            gz_noise_frame& frame = frames[i];
            std::vector<float> levels;
            for (uint64_t p = 0; p < frame.count; p++) levels.push_back(frame.parts[p].level);
            error[k] = encode_frame(frame, levels.data(), frame.poisoned != 0, step, digest, frame.parts, [](uint64_t, Work&) { return 0; },
                                    [&](const Span& span, Work&) {
                                        return reinterpret_cast<const uint8_t*>(frame.parts[span.part].values + span.first);
                                    });
        }
    });
    for (int64_t e : error)
        if (e) return e;
    return 0;
}

int64_t gz_noise_decode(const uint8_t* frame, uint64_t size, int32_t framed, const gz_noise_id* expected, const gz_noise_part* parts,
                        uint64_t count, int32_t add, uint32_t divisor, double* squares, int32_t threads) {
    if (!valid_parts(parts, count) || (add && (divisor != 1 || squares)) || !divisor) return GZ_BAD_ARGUMENT;
    const Places places(parts, count);
    noise::Body body;
    if (int error = body.read(frame, size, framed != 0, places, expected)) return error;
    const bool stream = !add && places.values() * 4 >= kStreamBytes;
    const Decoding how = add ? Decoding::adding() : Decoding::by(divisor, stream);
    const std::vector<uint64_t> bounds = shares(places.blocks(), threads);
    std::vector<int> error(bounds.size() - 1, 0);
    std::vector<double> sums(squares ? places.blocks() : 0);
    const noise::Kernels* use = noise::kernels();
    run_parts(bounds.size() - 1, [&](size_t k) {
        FloatMode mode;
        Behind behind{};
        for (uint64_t block = bounds[k]; block < bounds[k + 1] && !error[k]; block++)
            error[k] = decode_to(body, parts, places, block, how, use, &behind, squares ? &sums[block] : nullptr, [&](const Span& span) {
                return reinterpret_cast<uint8_t*>(parts[span.part].values + span.first);
            });
        finish(behind, use);
    });
    for (int e : error)
        if (e) return e;
    if (squares) {
        double total = 0;
        for (double sum : sums) total += sum;
        *squares = total / (double(divisor) * double(divisor));
    }
    return 0;
}

int64_t gz_noise_reduce(const gz_noise_term* terms, uint64_t term_count, const gz_noise_id* expected, gz_noise_frame* frame,
                        uint32_t step, uint32_t digest, uint64_t* failed) {
    *failed = 0;
    if (!term_count) return GZ_BAD_ARGUMENT;
    const Places places(frame->parts, frame->count);
    std::vector<noise::Body> bodies(term_count);
    std::vector<std::vector<float>> levels(frame->count);
    bool poisoned = false;
    const gz_noise_part* own = nullptr;
    for (uint64_t t = 0; t < term_count; t++) {
        *failed = t;
        const gz_noise_term& term = terms[t];
        if (term.parts) {
            if (!valid_parts(term.parts, frame->count) || !valid_levels(term.parts, frame->count)) return GZ_BAD_ARGUMENT;
            for (uint64_t i = 0; i < frame->count; i++)
                if (term.parts[i].n != frame->parts[i].n) return GZ_BAD_ARGUMENT;
            own = term.parts;
        } else {
            if (int error = bodies[t].read(term.data, term.size, term.framed != 0, places, expected)) return error;
            poisoned |= bodies[t].poisoned;
        }
        for (uint64_t i = 0; i < frame->count; i++) levels[i].push_back(term.parts ? term.parts[i].level : bodies[t].levels[i]);
    }
    FloatMode mode;
    std::vector<float> sums;
    for (const std::vector<float>& of_part : levels) sums.push_back(level_of_sum(of_part.data(), term_count));
    const noise::Kernels* use = noise::kernels();
    const int64_t error = encode_frame(
        *frame, sums.data(), poisoned, step, digest, own,
        [&](uint64_t block, Work& w) {
            for (uint64_t t = 0; t < term_count; t++) {
                *failed = t;
                auto to = [&](const Span& span) { return reinterpret_cast<uint8_t*>(w.sum + span.at); };
                if (!terms[t].parts) {
                    const Decoding how = t ? Decoding::adding() : Decoding::by(1, false);
                    if (int e = decode_to(bodies[t], frame->parts, places, block, how, use, nullptr, nullptr, to)) return e;
                    continue;
                }
                places.spans(frame->parts, block, [&](const Span& span) {
                    const uint8_t* x = reinterpret_cast<const uint8_t*>(terms[t].parts[span.part].values + span.first);
                    if (t) use->accumulate(x, span.n, w.sum + span.at);
                    else std::memcpy(w.sum + span.at, x, size_t(span.n) * 4);
                });
            }
            return 0;
        },
        [&](const Span& span, Work& w) { return reinterpret_cast<const uint8_t*>(w.sum + span.at); });
    return error;
}

}  // extern "C"
