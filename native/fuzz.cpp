// Damages valid bodies and decodes them with every instruction set, under the sanitizers (`make fuzz`).
//
//   fuzz [payloads] [seed]
//
// Every buffer is a heap block of exactly the right size, so that one byte read or written outside of it is seen.
// Beside that it checks what the format promises: all instruction sets write the same body, and of any body they
// give the same values or all refuse it. With GRADZIP_LIBFUZZER the same checks are an entry point for libFuzzer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gradzip.h"

namespace {

constexpr uint64_t kBlockValues = 4096, kSegmentValues = 32 * kBlockValues;

struct Random {
    uint64_t state;
    uint64_t bits() {  // splitmix64
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    uint64_t below(uint64_t n) { return n ? bits() % n : 0; }
    int range(int low, int high) { return low + int(below(uint64_t(high - low + 1))); }
    bool chance(int percent) { return below(100) < uint64_t(percent); }
};

// A heap block that ends exactly behind its last byte, and may begin at any address.
struct Buffer {
    std::unique_ptr<uint8_t[]> room;
    uint8_t* data;
    size_t size;
    explicit Buffer(size_t bytes, size_t offset = 0) : room(new uint8_t[bytes + offset]), data(room.get() + offset), size(bytes) {}
    Buffer(const std::vector<uint8_t>& bytes, size_t offset = 0) : Buffer(bytes.size(), offset) {
        std::copy(bytes.begin(), bytes.end(), data);
    }
    std::vector<uint8_t> first(size_t bytes) const { return {data, data + bytes}; }
};

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const char* at = gz_available_isas(); *at;) {
        size_t length = std::strcspn(at, ",");
        names.emplace_back(at, length);
        at += length + (at[length] == ',');
    }
    return names;
}

// --- One case: a tensor, how it is coded, and its body ---

struct Case {
    gz_job job{};
    uint64_t n = 0;
    std::vector<uint8_t> values, given, theta, second, lengths, body;
    int c0 = 0, c1 = 0, c2 = 0;
    size_t offset = 0;  // of every buffer from its alignment

    bool has_floor() const { return !given.empty() || !theta.empty(); }
    int item() const { return job.dtype == GZ_FLOAT32 ? 4 : 2; }
};

// The floors of a case in buffers of their own.
struct Floors {
    Buffer given, theta, second;
    gz_floor rule;
    explicit Floors(const Case& c) : given(c.given), theta(c.theta), second(c.second) {
        rule = {c.given.empty() ? nullptr : reinterpret_cast<const int8_t*>(given.data),
                c.theta.empty() ? nullptr : reinterpret_cast<const float*>(theta.data),
                c.second.empty() ? nullptr : reinterpret_cast<const float*>(second.data), c.c0, c.c1, c.c2};
    }
};

[[noreturn]] void fail(const char* what, const Case& c, const std::string& isa, int64_t a = 0, int64_t b = 0) {
    std::fprintf(stderr, "%s: isa %s, n %llu, dtype %d, mode %d, keep %d, limit %d, shift %d, book %u (%lld, %lld)\n", what,
                 isa.c_str(), static_cast<unsigned long long>(c.n), c.job.dtype, c.job.mode, c.job.keep, c.job.limit,
                 c.job.shift, c.job.book, static_cast<long long>(a), static_cast<long long>(b));
    std::abort();
}

struct Decoded {
    int64_t code;
    std::vector<uint8_t> values;
};

Decoded decode(const Case& c, const std::vector<uint8_t>& body, const std::string& isa, bool add) {
    gz_set_isa(isa.c_str());
    Floors floors(c);
    Buffer in(body, c.offset), out(c.values.size(), c.offset), book(c.lengths);
    std::fill(out.data, out.data + out.size, uint8_t(0x3c));
    int64_t code = gz_decode(in.data, in.size, c.job.dtype, c.n, c.has_floor() ? &floors.rule : nullptr, c.job.shift,
                             c.lengths.empty() ? nullptr : book.data, add, out.data, 1);
    return {code, out.first(code ? 0 : out.size)};
}

Decoded hop(const Case& c, const std::vector<uint8_t>& body, const std::string& isa) {
    gz_set_isa(isa.c_str());
    Floors floors(c);
    Buffer in(body, c.offset), local(c.values, c.offset), lengths(c.lengths), out(gz_bound(c.n, GZ_FLOAT32), c.offset);
    const uint8_t* table = c.lengths.empty() ? nullptr : lengths.data;
    int64_t size = gz_decode_add_encode(in.data, in.size, c.job.shift, table, &c.job, reinterpret_cast<const float*>(local.data),
                                        c.n, c.has_floor() ? &floors.rule : nullptr, table, out.data, out.size);
    return {size < 0 ? size : 0, out.first(size < 0 ? 0 : size_t(size))};
}

// --- What must hold for any body ---

struct Tally {
    uint64_t payloads = 0, accepted = 0;
};

void check(const Case& c, const std::vector<uint8_t>& body, bool add, bool ring, Tally* tally) {
    static const std::vector<std::string> names = isas();
    Decoded first{}, first_hop{};
    for (const std::string& isa : names) {
        Decoded here = decode(c, body, isa, add);
        if (isa == names[0]) first = here;
        if (!here.code != !first.code) fail("one instruction set accepts what another refuses", c, isa, here.code, first.code);
        if (here.values != first.values) fail("decoded values differ", c, isa);
        if (!ring) continue;
        Decoded sum = hop(c, body, isa);
        if (isa == names[0]) first_hop = sum;
        if (!sum.code != !first_hop.code) fail("one instruction set refuses a hop", c, isa, sum.code, first_hop.code);
        if (sum.values != first_hop.values) fail("the results of a hop differ", c, isa);
    }
    tally->payloads++;
    tally->accepted += !first.code;
}

// --- Frames: the same tensor twice, as an exchange sends it; in near mode the second one exact ---

constexpr int kCodecId = 2;

struct Pieces {
    Floors floors;
    Buffer lengths, values[2], lost[2];
    gz_piece piece[2];
    Pieces(const Case& c, bool loses)
        : floors(c), lengths(c.lengths), values{{c.values, c.offset}, {c.values, c.offset}},
          lost{Buffer(loses ? c.values.size() : 0, c.offset), Buffer(loses ? c.values.size() : 0, c.offset)} {
        for (int i = 0; i < 2; i++)
            piece[i] = {values[i].data, c.n, c.has_floor() ? floors.rule : gz_floor{}, c.lengths.empty() ? nullptr : lengths.data,
                        loses ? lost[i].data : nullptr, i == 1 && c.job.mode == GZ_NEAR};
    }
};

std::vector<uint8_t> encode_frames(const Case& c) {
    const bool loses = c.job.dtype == GZ_FLOAT32;
    std::vector<uint8_t> first;
    for (const std::string& isa : isas()) {
        gz_set_isa(isa.c_str());
        Pieces p(c, loses);
        Buffer out(2 * (32 + (gz_bound(c.n, c.job.dtype) + 7) / 8 * 8), c.offset);
        int64_t size = gz_encode_frames(&c.job, p.piece, 2, kCodecId, 0.7f, out.data, out.size, 1);
        if (size < 0) fail("encoding frames failed", c, isa, size);
        std::vector<uint8_t> frames = out.first(size_t(size));
        if (first.empty()) first = frames;
        if (frames != first) fail("frames differ", c, isa);
        if (!std::equal(c.body.begin(), c.body.end(), frames.begin() + 16 + 24)) fail("a frame holds another body", c, isa);
        if (loses && gz_lost(&c.job, p.piece, 2, 0.7f)) fail("what is lost is refused", c, isa);
    }
    return first;
}

void check_frames(const Case& c, const std::vector<uint8_t>& frames, bool intact) {
    static const std::vector<std::string> names = isas();
    Decoded first;
    for (const std::string& isa : names) {
        gz_set_isa(isa.c_str());
        Pieces p(c, false), own(c, false);
        Buffer in(frames, c.offset);
        const void* values[2] = {own.values[0].data, own.values[1].data};
        const gz_part parts[2] = {{nullptr, 0, values}, {in.data, in.size, nullptr}};
        uint64_t failed = 7;
        int64_t code = gz_sum_frames(&c.job, parts, 2, p.piece, 2, kCodecId, 0, 1, 1, &failed);
        Decoded here{code, p.values[1].first(code ? 0 : c.values.size())};
        if (intact && code) fail("valid frames are refused", c, isa, code);
        if (code && failed != 1) fail("the wrong part is to blame", c, isa, code, int64_t(failed));
        if (isa == names[0]) first = here;
        if (!here.code != !first.code) fail("one instruction set accepts frames that another refuses", c, isa, code, first.code);
        if (here.values != first.values) fail("sums of frames differ", c, isa);
    }
}

// --- Noise: a frame of a few parts, and the sum of two ---

struct NoiseCase {
    std::vector<std::vector<uint8_t>> values, shapes;  // of each part; an empty shape: none
    std::vector<gz_noise_part> parts;                  // without addresses
    std::vector<uint8_t> frame;
    size_t offset = 0;
    gz_noise_id id{7, 9};
};

// The parts of a case in buffers of their own.
struct NoiseParts {
    std::vector<Buffer> values, shapes;
    std::vector<gz_noise_part> part;
    explicit NoiseParts(const NoiseCase& c) : part(c.parts) {
        for (size_t i = 0; i < part.size(); i++) {
            values.emplace_back(c.values[i], c.offset);
            shapes.emplace_back(c.shapes[i], c.offset);
        }
        for (size_t i = 0; i < part.size(); i++) {
            part[i].values = reinterpret_cast<float*>(values[i].data);
            part[i].shape = c.shapes[i].empty() ? nullptr : reinterpret_cast<const int8_t*>(shapes[i].data);
        }
    }
    std::vector<uint8_t> all() const {
        std::vector<uint8_t> bytes;
        for (const Buffer& v : values) bytes.insert(bytes.end(), v.data, v.data + v.size);
        return bytes;
    }
};

[[noreturn]] void fail(const char* what, const NoiseCase& c, const std::string& isa, int64_t a = 0, int64_t b = 0) {
    std::fprintf(stderr, "noise: %s: isa %s, %zu parts (%lld, %lld)\n", what, isa.c_str(), c.parts.size(), static_cast<long long>(a),
                 static_cast<long long>(b));
    std::abort();
}

// Float32 bit patterns, with all NaNs made one.
std::vector<uint8_t> without_payloads(std::vector<uint8_t> bytes) {
    for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
        uint32_t u;
        std::memcpy(&u, bytes.data() + i, 4);
        if ((u & 0x7fffffff) > 0x7f800000) u = 0x7fc00000;
        std::memcpy(bytes.data() + i, &u, 4);
    }
    return bytes;
}

std::vector<uint8_t> encode_noise(const NoiseCase& c, size_t slot) {
    std::vector<uint8_t> first;
    for (const std::string& isa : isas()) {
        gz_set_isa(isa.c_str());
        NoiseParts p(c);
        Buffer out(slot ? slot : size_t(gz_noise_bound(p.part.data(), p.part.size())), c.offset);
        gz_noise_frame frame{p.part.data(), p.part.size(), out.data, out.size, 1, 0, 0, 0};
        if (int64_t code = gz_noise_encode(&frame, 1, c.id.step, c.id.digest, 1)) fail("encoding failed", c, isa, code);
        std::vector<uint8_t> bytes = out.first(size_t(frame.size));
        if (isa == isas()[0]) first = bytes;
        if (bytes != first) fail("frames differ", c, isa, int64_t(bytes.size()), int64_t(first.size()));
    }
    return first;
}

void check_noise(const NoiseCase& c, const std::vector<uint8_t>& frame, bool add, bool sum, bool intact, Tally* tally) {
    static const std::vector<std::string> names = isas();
    Decoded first{}, first_sum{};
    double first_squares = 0;
    for (const std::string& isa : names) {
        gz_set_isa(isa.c_str());
        NoiseParts to(c);
        Buffer in(frame, c.offset);
        double squares = 0;
        int64_t code = gz_noise_decode(in.data, in.size, 1, &c.id, to.part.data(), to.part.size(), add, add ? 1 : 3, add ? nullptr : &squares, 1);
        if (intact && code) fail("a valid frame is refused", c, isa, code);
        Decoded here{code, code ? std::vector<uint8_t>() : add ? without_payloads(to.all()) : to.all()};
        if (isa == names[0]) first = here, first_squares = squares;
        if (squares != first_squares && (squares == squares || first_squares == first_squares)) fail("sums of squares differ", c, isa);
        if (here.code != first.code) fail("one instruction set accepts what another refuses", c, isa, here.code, first.code);
        if (here.values != first.values) fail("decoded values differ", c, isa);
        if (!sum) continue;
        NoiseParts own(c), sums(c);
        Buffer out(size_t(gz_noise_bound(sums.part.data(), sums.part.size())), c.offset);
        const gz_noise_term terms[2] = {{nullptr, 0, 1, own.part.data()}, {in.data, in.size, 1, nullptr}};
        gz_noise_frame total{sums.part.data(), sums.part.size(), out.data, out.size, 1, 0, 0, 0};
        uint64_t failed = 7;
        code = gz_noise_reduce(terms, 2, &c.id, &total, c.id.step, c.id.digest, &failed);
        if (code && failed != 1) fail("the wrong term is to blame", c, isa, code, int64_t(failed));
        here = {code, out.first(code ? 0 : size_t(total.size))};
        if (isa == names[0]) first_sum = here;
        if (here.code != first_sum.code || here.values != first_sum.values) fail("sums differ", c, isa, here.code, first_sum.code);
    }
    tally->payloads++;
    tally->accepted += !first.code;
}

// --- Block-scaled codes: a frame of a few parts, and the sum of two. Any bytes mean something, if there are enough ---

struct ScaledCase {
    int kind = 0, block = 32;
    bool hadamard = false;
    std::vector<std::vector<uint8_t>> values;  // of each part
    std::vector<gz_scaled_part> parts;         // without addresses
    std::vector<uint8_t> frame;
    size_t size = 0, offset = 0;
};

// The parts of a case in buffers of their own.
struct ScaledParts {
    std::vector<Buffer> values, outs;
    std::vector<gz_scaled_part> part;
    explicit ScaledParts(const ScaledCase& c) : part(c.parts) {
        for (const std::vector<uint8_t>& v : c.values) values.emplace_back(v, c.offset), outs.emplace_back(v.size(), c.offset);
        for (size_t i = 0; i < part.size(); i++) {
            part[i].values = reinterpret_cast<const float*>(values[i].data);
            part[i].out = reinterpret_cast<float*>(outs[i].data);
        }
    }
};

[[noreturn]] void fail(const char* what, const ScaledCase& c, const std::string& isa, int64_t code = 0) {
    std::fprintf(stderr, "scaled: %s: isa %s, kind %d, block %d, hadamard %d, %zu parts (%lld)\n", what, isa.c_str(), c.kind,
                 c.block, c.hadamard, c.parts.size(), static_cast<long long>(code));
    std::abort();
}

// Into a frame, or, if `divisor` says by what, into values.
Decoded code_scaled(const ScaledCase& c, const std::string& isa, const std::vector<const std::vector<uint8_t>*>& frames, size_t size,
                    uint32_t divisor) {
    gz_set_isa(isa.c_str());
    ScaledParts p(c);
    std::vector<Buffer> in;
    std::vector<const uint8_t*> terms;
    for (const std::vector<uint8_t>* frame : frames) {
        if (frame) in.emplace_back(*frame, c.offset);
        terms.push_back(frame ? in.back().data : nullptr);
    }
    Buffer out(divisor ? 0 : size, c.offset);
    std::fill(out.data, out.data + out.size, uint8_t(0));  // as its owners do: nothing is written between parts
    int64_t code = gz_scaled_code(c.kind, c.block, c.hadamard, p.part.data(), p.part.size(), terms.data(), terms.size(),
                                  divisor ? divisor : 1, divisor ? nullptr : out.data, size, 1);
    Decoded result{code, out.first(code ? 0 : out.size)};
    for (const Buffer& values : p.outs)
        if (divisor && !code) result.values.insert(result.values.end(), values.data, values.data + values.size);
    return result;
}

void check_scaled(const ScaledCase& c, const std::vector<uint8_t>& frame, bool sum, Tally* tally) {
    static const std::vector<std::string> names = isas();
    Decoded first{}, first_sums[2]{};
    for (const std::string& isa : names) {
        Decoded here = code_scaled(c, isa, {&frame}, frame.size(), 1);
        if (isa == names[0]) first = here;
        if (!here.code != (frame.size() >= c.size)) fail("a frame is refused by another thing than its size", c, isa, here.code);
        if (here.values != first.values) fail("decoded values differ", c, isa);
        if (!sum) continue;
        for (uint32_t divisor : {0u, 3u}) {
            here = code_scaled(c, isa, {nullptr, &frame, &c.frame}, std::min(frame.size(), c.size), divisor);
            Decoded& first_sum = first_sums[divisor > 0];
            if (isa == names[0]) first_sum = here;
            if (here.code != first_sum.code || here.values != first_sum.values) fail("sums differ", c, isa, here.code);
        }
    }
    tally->payloads++;
    tally->accepted += !first.code;
}

#if !defined(GRADZIP_LIBFUZZER)  // libFuzzer makes and damages its cases itself

// The table of sizes and the headers are hit as often as the rest.
std::vector<uint8_t> damaged_frames(std::vector<uint8_t> frames, Random& random) {
    for (int times = 1 + int(random.below(2)); times > 0 && !frames.empty(); times--) {
        const size_t at = random.below(random.chance(50) ? std::min<size_t>(frames.size(), 48) : frames.size());
        if (random.chance(10)) {
            frames.resize(random.chance(50) ? at : frames.size() + 1 + at % 40);
        } else {
            frames[at] ^= uint8_t(1 << random.below(8));
        }
    }
    return frames;
}

// --- Values ---

uint32_t make_float(Random& random, int shape, int center) {
    uint32_t sign = uint32_t(random.below(2)) << 31, mantissa = uint32_t(random.below(1 << 23));
    auto clamp = [](int e) { return uint32_t(e < 1 ? 1 : e > 254 ? 254 : e); };
    static const uint32_t special[] = {0, 0x80000000, 1, 0x807fffff, 0x00800000, 0x7f7fffff, 0x7f800000, 0xff800000,
                                       0x7fc00000, 0xff812345, 0x3f800000};
    switch (shape) {
        case 0: {  // like a gradient: a few exponents, the larger the rarer
            int e = center;
            while (e > center - 20 && random.chance(45)) e--;
            return sign | clamp(e) << 23 | mantissa;
        }
        case 1: return random.chance(94) ? 0 : sign | clamp(center - random.range(0, 6)) << 23 | mantissa;
        case 2: return sign | clamp(center) << 23 | mantissa;                       // one exponent
        case 3: return special[random.below(std::size(special))];
        case 4: return uint32_t(random.bits());                                     // incompressible
        case 5: return sign | clamp(center - random.range(0, 9)) << 23 | (mantissa & 0x7f0000);  // from bfloat16
        case 6: return random.chance(2) ? special[random.below(std::size(special))] : make_float(random, 0, center);
        default: return 0;
    }
}

std::vector<uint8_t> make_values(Random& random, uint64_t n, int dtype, int center) {
    const int item = dtype == GZ_FLOAT32 ? 4 : 2;
    std::vector<uint8_t> bytes(n * uint64_t(item));
    int shape = random.range(0, 7);
    for (uint64_t i = 0; i < n; i++) {
        if (i % kBlockValues == 0 && random.chance(60)) shape = random.range(0, 7);
        uint32_t u = make_float(random, shape, center);
        if (dtype == GZ_BFLOAT16) u >>= 16;
        if (dtype == GZ_FLOAT16) u = (u >> 16 & 0x8000) | ((u >> 23) % 32) << 10 | (u >> 13 & 1023);
        std::memcpy(bytes.data() + i * uint64_t(item), &u, size_t(item));
    }
    return bytes;
}

// --- Making cases ---

std::vector<uint8_t> encode(const Case& c, const std::string& isa) {
    gz_set_isa(isa.c_str());
    Floors floors(c);
    Buffer values(c.values, c.offset), lengths(c.lengths), out(gz_bound(c.n, c.job.dtype), c.offset);
    int64_t size = gz_encode(&c.job, values.data, c.n, c.has_floor() ? &floors.rule : nullptr,
                             c.lengths.empty() ? nullptr : lengths.data, out.data, out.size, 1);
    if (size < 0) fail("encoding failed", c, isa, size);
    return out.first(size_t(size));
}

uint64_t make_size(Random& random) {
    uint64_t kind = random.below(1000);
    if (kind < 3) return kSegmentValues + random.below(5000);
    if (kind < 70) return 4 * kBlockValues + random.below(3 * kBlockValues);  // enough for a whole group of blocks
    if (kind < 120) return random.below(4) * kBlockValues + random.below(70);
    if (kind < 200) return 4000 + random.below(200);
    if (kind < 400) return 100 + random.below(900);
    return random.below(100);
}

// Lengths of a complete code: splits leaves of a tree at random.
std::vector<uint8_t> make_lengths(Random& random, uint64_t segments) {
    std::vector<uint8_t> all;
    for (uint64_t i = 0; i < segments; i++) {
        std::vector<int> leaves{0};
        for (int splits = random.range(0, 60); splits > 0; splits--) {
            size_t at = random.below(leaves.size());
            if (leaves[at] == 8) continue;
            leaves[at]++;
            leaves.push_back(leaves[at]);
        }
        std::vector<uint8_t> lengths(256);
        for (size_t s = 1; s < leaves.size(); s++) {  // the first leaf is the escape's
            size_t symbol = random.chance(80) ? (random.below(16) + 248) % 256 : random.below(256);
            while (lengths[symbol]) symbol = (symbol + 1) % 256;
            lengths[symbol] = uint8_t(leaves[s]);
        }
        all.insert(all.end(), lengths.begin(), lengths.end());
    }
    return all;
}

Case make_case(Random& random) {
    Case c;
    c.n = make_size(random);
    c.offset = random.chance(20) ? random.below(64) : 0;
    static const int dtypes[] = {GZ_FLOAT32, GZ_FLOAT32, GZ_FLOAT32, GZ_BFLOAT16, GZ_FLOAT16};
    c.job.dtype = dtypes[random.below(5)];
    c.job.mode = random.range(GZ_LOSSLESS, GZ_PAPER);
    if (c.job.mode != GZ_NEAR && random.chance(30)) c.job.mode = GZ_NEAR;  // it has the most forms
    c.job.keep = random.range(0, 23);
    c.job.truncate = random.chance(50);
    c.job.limit = random.chance(70) ? 8 : random.range(1, 8);
    c.job.shift = random.chance(70) ? 0 : random.range(0, 20);
    const int center = random.range(1, 254);
    c.values = make_values(random, c.n, c.job.dtype, center);
    if (random.chance(25)) c.lengths = make_lengths(random, (c.n + kSegmentValues - 1) / kSegmentValues);
    if (!c.lengths.empty() && random.chance(50)) c.job.book = uint32_t(1 + random.below(0xffffffff));
    if (c.job.mode == GZ_NEAR || c.job.mode == GZ_PAPER) {
        int grid = center - 127 - random.range(-2, 30);
        if (c.job.mode == GZ_PAPER) grid = center - 127 + random.range(-2, 30);
        if (random.chance(10)) grid = random.range(95, 127);  // around the coarsest grid
        if (random.chance(60)) {
            c.given.resize(c.n);
            for (uint8_t& f : c.given) f = uint8_t(random.chance(3) ? -128 : std::clamp(grid + random.range(-3, 3), -128, 127));
        } else {
            c.theta = make_values(random, c.n, GZ_FLOAT32, 120);
            c.c0 = grid - 120;
            if (random.chance(60)) {
                c.second = make_values(random, c.n, GZ_FLOAT32, 80);
                c.c0 -= 40;
                c.c2 = random.range(0, 90);
                if (random.chance(10)) {  // a rule that 16 bits do not hold
                    c.c2 = 1 << 17;
                    c.c0 -= (1 << 16) - 40;
                }
            }
        }
        if (c.n == 0) c.given.assign(1, 0);
    }
    for (const std::string& isa : isas()) {
        std::vector<uint8_t> body = encode(c, isa);
        if (isa == isas()[0]) c.body = body;
        if (body != c.body) fail("bodies differ", c, isa, int64_t(body.size()), int64_t(c.body.size()));
    }
    Decoded own = decode(c, c.body, isas()[0], false);
    if (own.code) fail("a valid body is refused", c, isas()[0], own.code);
    bool exact = c.job.mode == GZ_LOSSLESS || c.job.dtype != GZ_FLOAT32;
    if (exact && own.values != c.values) fail("a lossless body loses", c, isas()[0]);
    return c;
}

// --- Damage ---

// Where things are in a body of n values: enough to aim at the fields that steer a decoder.
struct Map {
    size_t tables, index, blocks;
    uint64_t count;
    Map(uint64_t n, bool book) {
        count = (n + kBlockValues - 1) / kBlockValues;
        tables = 8;
        index = tables + (book ? 0 : 128 * size_t((n + kSegmentValues - 1) / kSegmentValues));
        blocks = index + (2 * size_t(count) + 3) / 4 * 4;
    }
    unsigned entry(const std::vector<uint8_t>& body, uint64_t i) const { return body[index + 2 * i] | body[index + 2 * i + 1] << 8; }
    void set_entry(std::vector<uint8_t>& body, uint64_t i, unsigned value) const {
        body[index + 2 * i] = uint8_t(value);
        body[index + 2 * i + 1] = uint8_t(value >> 8);
    }
    size_t start(const std::vector<uint8_t>& body, uint64_t number) const {
        size_t at = blocks;
        for (uint64_t i = 0; i < number; i++) at += 4 * (entry(body, i) & 0x3fff);
        return at;
    }
};

void damage_once(std::vector<uint8_t>& body, const std::vector<uint8_t>& other, const Map& map, Random& random) {
    auto anywhere = [&] { return random.below(body.size()); };
    const bool intact = map.count && body.size() >= map.blocks;
    const uint64_t block = random.below(map.count);
    const size_t start = intact ? map.start(body, block) : 0;
    const size_t bytes = intact ? 4 * (map.entry(body, block) & 0x3fff) : 0;
    switch (random.below(14)) {
        case 0:
        case 1:
            if (!body.empty()) body[anywhere()] ^= uint8_t(1 << random.below(8));
            break;
        case 2:
            if (!body.empty()) body[anywhere()] = uint8_t(random.bits());
            break;
        case 3: body.resize(anywhere()); break;
        case 4: body.resize(body.size() + 1 + random.below(70), uint8_t(random.chance(50) ? 0 : random.bits())); break;
        case 5:  // splice: a piece of another body
            if (!body.empty() && !other.empty()) {
                size_t to = anywhere(), from = random.below(other.size());
                size_t length = std::min({body.size() - to, other.size() - from, size_t(1 + random.below(300))});
                std::copy_n(other.begin() + long(from), length, body.begin() + long(to));
            }
            break;
        case 6:  // another length or kind of a block
            if (intact) map.set_entry(body, block, map.entry(body, block) ^ (1u << random.below(16)));
            break;
        case 7:  // a block that grows or shrinks together with its length
            if (intact && start + bytes <= body.size()) {
                size_t words = 1 + random.below(20);
                if (random.chance(50)) {
                    body.insert(body.begin() + long(start + random.below(bytes + 1)), 4 * words, uint8_t(random.bits()));
                    map.set_entry(body, block, (map.entry(body, block) + unsigned(words)) & 0xffff);
                } else if (bytes >= 4 * words) {
                    size_t at = start + random.below(bytes - 4 * words + 1);
                    body.erase(body.begin() + long(at), body.begin() + long(at + 4 * words));
                    map.set_entry(body, block, map.entry(body, block) - unsigned(words));
                }
            }
            break;
        case 8:
        case 9:  // the head of a block
            if (intact && start + 4 <= body.size()) body[start + random.below(4)] ^= uint8_t(1 << random.below(8));
            break;
        case 10:  // a lane state, or the first bits of a sparse block
            if (intact && start + 68 <= body.size()) body[start + 4 + random.below(64)] ^= uint8_t(1 << random.below(8));
            break;
        case 11:  // the end of a block: refill stream, mantissas, padding
            if (intact && bytes && start + bytes <= body.size())
                body[start + bytes - 1 - random.below(std::min<size_t>(bytes, 8))] ^= uint8_t(1 << random.below(8));
            break;
        case 12:  // two code lengths change places: still a complete code
            if (body.size() >= map.index && map.index >= map.tables + 128)
                std::swap(body[map.tables + random.below(128)], body[map.tables + random.below(128)]);
            break;
        default:  // the head of the body
            if (body.size() >= 8) body[random.below(8)] = uint8_t(random.below(4));
    }
}

std::vector<uint8_t> damaged(const Case& c, const std::vector<uint8_t>& other, Random& random) {
    std::vector<uint8_t> body = c.body;
    const Map map(c.n, c.job.book != 0);
    for (int times = 1 + int(random.below(3)); times > 0; times--) damage_once(body, other, map, random);
    return body;
}

// --- Noise ---

NoiseCase make_noise(Random& random) {
    NoiseCase c;
    c.offset = random.chance(20) ? random.below(64) : 0;
    const int count = random.range(1, 3);
    for (int i = 0; i < count; i++) {
        const uint64_t kind = random.below(100);
        const uint64_t n = kind < 10 ? random.below(3) * 8192 + random.below(300) : kind < 50 ? random.below(900) : random.below(100);
        const int center = random.range(1, 254);
        c.values.push_back(make_values(random, n, GZ_FLOAT32, center));
        c.shapes.emplace_back();
        if (random.chance(40))
            for (uint64_t j = 0; j < n; j++) c.shapes.back().push_back(uint8_t(-random.range(0, 12)));
        const int exponent = std::clamp(center - random.range(-4, 9), 1, 254);  // around the values, so that all classes occur
        uint32_t level = random.chance(5) ? (random.chance(50) ? 0 : 0x7fc00000) : uint32_t(exponent) << 23 | uint32_t(random.below(1 << 23));
        gz_noise_part part{nullptr, n, nullptr, random.chance(50) ? 0 : 65500 + random.below(100), random.bits(), uint32_t(random.bits()), 0};
        if (random.chance(10)) {  // values between two draws: docs/format.md, "Rounding"
            level = 0x3f800000;
            c.shapes.back().clear();
            part.start &= ~uint64_t(31);
            for (uint64_t j = 0; j < n; j++) {
                uint32_t h = uint32_t(part.start + j) ^ uint32_t(part.key);
                h = (h ^ h >> 16) * 0x7feb352du;
                h = (h ^ h >> 15) * 0x846ca68bu;
                const uint32_t draw = ((h ^ h >> 16) + uint32_t(part.key >> 32) + part.offset) >> 8;
                const float t = float((random.range(-4, 4) * 0.25 - draw + (random.chance(50) ? 0x1p24 : 0)) * 0x1p-24);
                std::memcpy(c.values.back().data() + 4 * j, &t, 4);
            }
        }
        std::memcpy(&part.level, &level, 4);
        c.parts.push_back(part);
    }
    c.frame = encode_noise(c, 0);
    const size_t least = 24 + 16 + 4 * c.parts.size() + 32;  // room for the index of up to 16 blocks
    encode_noise(c, least + random.below(c.frame.size()));
    return c;
}

std::vector<uint8_t> damaged_noise(const NoiseCase& c, const std::vector<uint8_t>& other, Random& random) {
    std::vector<uint8_t> frame = c.frame;
    const size_t blocks = 24 + 16 + 4 * c.parts.size() + 4;
    for (int times = 1 + int(random.below(3)); times > 0 && !frame.empty(); times--) {
        const size_t anywhere = random.below(frame.size());
        switch (random.below(9)) {
            case 0: frame.resize(anywhere); break;
            case 1: frame.resize(frame.size() + 1 + random.below(50), uint8_t(random.bits())); break;
            case 2: frame[random.below(std::min<size_t>(frame.size(), 48))] ^= uint8_t(1 << random.below(8)); break;
            case 3:  // the first block's head, mask and lengths
            case 4:
                frame[std::min(frame.size() - 1, blocks + random.below(24))] ^= uint8_t(1 << random.below(8));
                break;
            case 5: frame[anywhere] = uint8_t(random.bits()); break;
            case 6:  // splice
                if (!other.empty()) {
                    const size_t from = random.below(other.size());
                    const size_t length = std::min({frame.size() - anywhere, other.size() - from, size_t(1 + random.below(200))});
                    std::copy_n(other.begin() + long(from), length, frame.begin() + long(anywhere));
                }
                break;
            case 7:  // the lists at the end
                frame[frame.size() - 1 - random.below(std::min<size_t>(frame.size(), 12))] ^= uint8_t(1 << random.below(8));
                break;
            default: frame[anywhere] ^= uint8_t(1 << random.below(8));
        }
    }
    return frame;
}

// --- Block-scaled codes ---

ScaledCase make_scaled(Random& random) {
    ScaledCase c;
    c.offset = random.chance(20) ? 4 * random.below(16) : 0;
    c.kind = random.range(0, 2);
    c.block = 32 << random.below(4);
    c.hadamard = c.kind != 2 && random.chance(50);
    const int count = random.range(1, 3), center = random.range(1, 254);
    uint64_t scales = 0, codes = 0;
    for (int i = 0; i < count; i++) {
        const uint64_t kind = random.below(100), n = kind < 10 ? 4096 + random.below(300) : kind < 50 ? random.below(900) : random.below(100);
        c.values.push_back(make_values(random, n, GZ_FLOAT32, center));
        gz_scaled_part part{};
        part.n = n;
        part.start = 32 * random.below(1 << 20);
        part.key = random.bits(), part.signs = random.bits(), part.offset = uint32_t(random.bits());
        part.scale_at = scales, part.code_at = codes;
        scales += (n + uint64_t(c.block) - 1) / uint64_t(c.block);
        codes += (n + 31) / 32 * 32 / (c.kind == 1 ? 2 : 1);
        c.parts.push_back(part);
    }
    const uint64_t begin = (2 * scales + 15) / 16 * 16;
    for (gz_scaled_part& part : c.parts) part.code_at += begin;
    c.size = begin + codes;
    for (const std::string& isa : isas()) {
        const Decoded made = code_scaled(c, isa, {}, c.size, 0);
        if (made.code) fail("encoding failed", c, isa, made.code);
        if (isa == isas()[0]) c.frame = made.values;
        if (made.values != c.frame) fail("frames differ", c, isa);
    }
    return c;
}

std::vector<uint8_t> damaged_scaled(const ScaledCase& c, Random& random) {
    std::vector<uint8_t> frame = c.frame;
    static const uint16_t odd[] = {0, 1, 0x7f, 0x80, 0x7f7f, 0x7f80, 0x7fc0, 0x7fff, 0x8000, 0xbf80, 0xff80, 0xffff};
    for (int times = 1 + int(random.below(3)); times > 0 && !frame.empty(); times--) {
        const size_t anywhere = random.below(frame.size()), scale = 2 * random.below(std::min<size_t>(frame.size() / 2, 64));
        switch (random.below(6)) {
            case 0: frame.resize(random.chance(50) ? anywhere : frame.size() + random.below(50)); break;
            case 1: frame[anywhere] = uint8_t(random.chance(50) ? 0x80 : random.bits()); break;  // -128, and NaN of fp8
            case 2: std::memcpy(frame.data() + scale, &odd[random.below(std::size(odd))], std::min<size_t>(2, frame.size())); break;
            case 3:
                for (size_t i = 0; i < std::min<size_t>(64, frame.size() - anywhere); i++) frame[anywhere + i] = uint8_t(random.bits());
                break;
            default: frame[anywhere] ^= uint8_t(1 << random.below(8));
        }
    }
    return frame;
}

#endif
}  // namespace

#if defined(GRADZIP_LIBFUZZER)

// The first bytes describe the tensor and its floors, the rest is the body.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 8) return 0;
    Case c;
    c.job = {data[0] % 3, data[1] % 4, 23, 0, 8, data[2] % 4, 0};
    c.n = (data[3] | uint64_t(data[4]) << 8) % (5 * kBlockValues) + (data[5] % 16 ? 0 : kSegmentValues);
    c.values.assign(c.n * uint64_t(c.item()), data[6]);
    c.given.resize(c.n + 1);
    for (uint64_t i = 0; i < c.n; i++) c.given[i] = uint8_t(data[7] + i % 3);
    Tally tally;
    check(c, {data + 8, data + size}, data[5] & 16, c.job.dtype == GZ_FLOAT32 && data[5] & 32, &tally);
    return 0;
}

#else

int main(int count, char** arguments) {
    const uint64_t payloads = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1000000;
    Random random{count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1};
    constexpr int per_case = 100;
    Tally tally;
    uint64_t cases = 0;
    std::vector<uint8_t> other;
    while (tally.payloads < payloads) {
        Case c = make_case(random);
        const bool single = c.job.dtype == GZ_FLOAT32;
        cases++;
        for (int i = 0; i < per_case && tally.payloads < payloads; i++)
            check(c, damaged(c, other, random), random.chance(30), single && random.chance(20), &tally);
        const std::vector<uint8_t> frames = encode_frames(c);
        check_frames(c, frames, true);
        for (int i = 0; i < per_case / 5; i++) check_frames(c, damaged_frames(frames, random), false);
        other = c.body;
    }
    Tally noise;
    uint64_t noise_cases = 0;
    other.clear();
    while (noise.payloads < payloads) {
        const NoiseCase c = make_noise(random);
        noise_cases++;
        Tally whole;
        check_noise(c, c.frame, false, true, true, &whole);
        for (int i = 0; i < per_case && noise.payloads < payloads; i++)
            check_noise(c, damaged_noise(c, other, random), random.chance(30), random.chance(20), false, &noise);
        other = c.frame;
    }
    Tally scaled;
    uint64_t scaled_cases = 0;
    while (scaled.payloads < payloads) {
        const ScaledCase c = make_scaled(random);
        scaled_cases++;
        Tally whole;
        check_scaled(c, c.frame, true, &whole);
        for (int i = 0; i < per_case && scaled.payloads < payloads; i++)
            check_scaled(c, damaged_scaled(c, random), random.chance(20), &scaled);
    }
    std::printf("%llu damaged payloads of %llu bodies, each decoded by %s: %llu refused, %llu decoded, no fault\n",
                static_cast<unsigned long long>(tally.payloads), static_cast<unsigned long long>(cases), gz_available_isas(),
                static_cast<unsigned long long>(tally.payloads - tally.accepted),
                static_cast<unsigned long long>(tally.accepted));
    std::printf("%llu damaged frames of %llu cases of noise: %llu refused, %llu decoded, no fault\n",
                static_cast<unsigned long long>(noise.payloads), static_cast<unsigned long long>(noise_cases),
                static_cast<unsigned long long>(noise.payloads - noise.accepted), static_cast<unsigned long long>(noise.accepted));
    std::printf("%llu damaged frames of %llu cases of int8, int4 and fp8: %llu refused, %llu decoded, no fault\n",
                static_cast<unsigned long long>(scaled.payloads), static_cast<unsigned long long>(scaled_cases),
                static_cast<unsigned long long>(scaled.payloads - scaled.accepted), static_cast<unsigned long long>(scaled.accepted));
}

#endif
