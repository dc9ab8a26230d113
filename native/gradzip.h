// gradzip's native engine: the GComp body of docs/format.md on the CPU.
//
// A plain C interface without dependencies; Python loads it with ctypes. All functions are thread-safe.
// Sizes are in bytes, counts in values. Functions that can fail return a negative gz_error.
//
// Contracts:
//  * Inputs and outputs may lie at any address; nothing is read or written outside of the given ranges.
//  * Decoders check before they read: any byte string is safe to decode. Blocks are delivered as they are decoded: after
//    an error, out is undefined, and what was there to be added to is lost. Who needs it must decode to another place.
//  * The bytes written are the same for every instruction set and thread count.
#ifndef GRADZIP_H
#define GRADZIP_H

#include <stdint.h>

#if defined(_WIN32)
#define GZ_API __declspec(dllexport)
#else
#define GZ_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Raised with every change of this file or planner.h, so that a caller can tell a library of another version.
#define GZ_VERSION 9
GZ_API int32_t gz_version(void);

enum gz_dtype { GZ_FLOAT32 = 0, GZ_BFLOAT16 = 1, GZ_FLOAT16 = 2 };
enum gz_mode { GZ_LOSSLESS = 0, GZ_KEEP = 1, GZ_NEAR = 2, GZ_PAPER = 3 };

enum gz_error {
    GZ_TRUNCATED_HEAD = -1,    // the body ends inside its head, tables or index
    GZ_TRUNCATED_BLOCK = -2,   // a block ends behind the end of the body
    GZ_BAD_HEAD = -3,          // reserved or contradictory bits in the head
    GZ_BAD_TABLE = -4,         // code lengths that are no complete code
    GZ_BAD_INDEX = -5,         // non-zero padding behind the index
    GZ_TRAILING = -6,          // bytes after the last block
    GZ_BAD_KIND = -7,          // a block of reserved kind, or sparse outside of near mode
    GZ_BAD_RAW = -8,           // a raw block of the wrong size or padding
    GZ_BAD_DENSE = -9,         // the head of a dense block contradicts itself
    GZ_BAD_LANES = -10,        // lanes do not end where they began; near mode: or other floors than the encoder's
    GZ_BAD_FIELDS = -11,       // another number of fields than the head says
    GZ_BAD_SPARSE = -12,       // a sparse block contradicts itself
    GZ_NO_ROOM = -13,          // the output buffer is smaller than gz_bound
    GZ_BAD_ARGUMENT = -14,     // a mode that the dtype does not have, a missing floor, an impossible limit
    GZ_NO_BOOK = -15,          // the frame uses a shared book and none was given
    GZ_BAD_FRAMES = -16,       // a table of sizes or a frame header that does not fit the values expected
    GZ_NOISE_HEAD = -17,       // the head of a noise body makes no sense, or it has another number of parts
    GZ_NOISE_LEVEL = -18,      // a number that is no level
    GZ_NOISE_BLOCK = -19,      // the head of a noise block contradicts itself
    GZ_NOISE_LANES = -20,      // a noise block ends inside its lanes, or a lane does not end with its last code
    GZ_NOISE_LISTS = -21,      // a noise block has other escapes or giants than its lanes say
    GZ_NOISE_RAW = -22,        // a raw noise block of the wrong size or head
    GZ_NOISE_OTHER = -23       // a noise frame of another step or program
};

// How to code: the mode and its numbers.
typedef struct {
    int32_t dtype;     // gz_dtype; 16-bit types are always coded losslessly
    int32_t mode;      // gz_mode
    int32_t keep;      // mantissa bits, for GZ_KEEP
    int32_t truncate;  // cut instead of rounding, for GZ_KEEP
    int32_t limit;     // longest code, 1-8
    int32_t shift;     // added to every floor, 0-127
    uint32_t book;     // id of a shared book: no tables are written; 0: tables in the frame
} gz_job;

// Where the floors of near mode (or the reaches of paper mode) come from: `given` if not NULL, else the rule
// f = E(theta) + (max(E(second) + c1, c2) >> 1) + c0 with E the exponent field; second may be NULL.
typedef struct {
    const int8_t* given;
    const float* theta;
    const float* second;
    int32_t c0, c1, c2;
} gz_floor;

// The largest body of n values.
GZ_API uint64_t gz_bound(uint64_t n, int32_t dtype);

// Writes the body of x. lengths: 256 per segment, or NULL to sample x. Returns the body's size.
GZ_API int64_t gz_encode(const gz_job* job, const void* x, uint64_t n, const gz_floor* floor, const uint8_t* lengths,
                         uint8_t* out, uint64_t capacity, int32_t threads);

// Reads a body into out (adding to it if add is non-zero). book: 256 lengths per segment where the frame uses a
// shared book, else NULL. Returns 0.
GZ_API int64_t gz_decode(const uint8_t* body, uint64_t size, int32_t dtype, uint64_t n, const gz_floor* floor,
                         int32_t shift, const uint8_t* book, int32_t add, void* out, int32_t threads);

// Values that have a frame of their own (docs/format.md, "Frame") among others. Several frames lie one behind the other
// as an exchange sends them: a table of their sizes, 8 bytes each, then the frames, each padded with zeros to 8 bytes.
typedef struct {
    void* values;
    uint64_t n;
    gz_floor floor;          // all NULL: there is none
    const uint8_t* lengths;  // 256 per segment; NULL: sampled, or in the frame
    void* lost;              // encoders: where what is lost goes, n float32 divided by `scale`; NULL: nowhere
    int32_t exact;           // non-zero: coded as by GZ_LOSSLESS, whatever the job's mode
} gz_piece;

// Writes frames without checksums for all pieces; `codec` is their codec id. Values with `lost` are float32. Returns the
// bytes written: at the most, for each piece, 32 and gz_bound rounded up to 8.
GZ_API int64_t gz_encode_frames(const gz_job* job, const gz_piece* pieces, uint64_t count, int32_t codec, float scale,
                                uint8_t* out, uint64_t capacity, int32_t threads);

// Only notes what encoding would lose.
GZ_API int64_t gz_lost(const gz_job* job, const gz_piece* pieces, uint64_t count, float scale);

// One part of a sum: frames; or values, as they would be decoded from frames made by `job`, or of pieces that are exact.
typedef struct {
    const uint8_t* data;
    uint64_t size;
    const void* const* values;  // those of each piece; NULL: frames
} gz_part;

// The sum of parts, in their order, into all pieces (adding to what is there if add is non-zero), block by block without
// leaving the cache; divided by `divisor`, which is 1 for values that are not float32. job: dtype, shift, book and codec are those of all frames, the rest is for parts without frames.
// Returns 0, or an error and in *failed the number of the part that caused it.
GZ_API int64_t gz_sum_frames(const gz_job* job, const gz_part* parts, uint64_t part_count, const gz_piece* pieces,
                             uint64_t count, int32_t codec, int32_t add, uint32_t divisor, int32_t threads,
                             uint64_t* failed);

// One hop of a ring, block by block without leaving the cache: encodes local + decoded body. The result is coded
// with `job` and `lengths` (NULL: the tables of the incoming body). FLOAT32 only. in_shift belongs to the incoming body.
GZ_API int64_t gz_decode_add_encode(const uint8_t* body, uint64_t size, int32_t in_shift, const uint8_t* book,
                                    const gz_job* job, const float* local, uint64_t n, const gz_floor* floor,
                                    const uint8_t* lengths, uint8_t* out, uint64_t capacity);

// Sampled symbol counts, 256 per segment.
GZ_API int64_t gz_histogram(const gz_job* job, const void* x, uint64_t n, const gz_floor* floor, int64_t* counts);

// Code lengths of `rows` histograms of 256 counts, at most `limit` (1-8) each. Returns 0.
GZ_API int64_t gz_code_lengths(const int64_t* counts, uint64_t rows, int32_t limit, uint8_t* lengths);

// The floors that a rule gives, as int8.
GZ_API void gz_floors(const gz_floor* floor, uint64_t n, int8_t* out);

// Every stride-th of some numbers.
typedef struct {
    const int32_t* first;
    uint64_t count, stride;
} gz_strided;

// The sum of each row.
GZ_API void gz_strided_sums(const gz_strided* rows, uint64_t count, int64_t* sums);

// Of each name the BLAKE2b digest of 8 bytes, as a little-endian number, of `prefix` and the name. The names lie one behind
// the other.
GZ_API void gz_hash_names(const uint8_t* prefix, uint64_t prefix_size, const uint8_t* names, const uint64_t* sizes,
                          uint64_t count, uint64_t* digests);

// The frame checksum of docs/format.md over `size` bytes whose first word has number first_word.
GZ_API uint64_t gz_checksum(const uint8_t* data, uint64_t size, uint64_t first_word);

// --- The codec noise (docs/format.md, "Noise") ---

// Values of one tensor that lie in a frame one behind the other.
typedef struct {
    float* values;        // read by encoders, written by decoders
    uint64_t n;
    const int8_t* shape;  // -12 to 0 for each value; NULL: all 0
    uint64_t start;       // index of the first value in its tensor
    uint64_t key;         // of the draws
    uint32_t offset;      // added to the draws
    float level;          // nominal, for encoders
} gz_noise_part;

typedef struct {
    double squares;   // the sum A
    int64_t weights;  // the sum B, times 4^12
    int32_t finite;   // whether all values are
} gz_noise_statistics;

// Of each part, which is a whole tensor here. Returns 0.
GZ_API int64_t gz_noise_statistics_of(const gz_noise_part* parts, uint64_t count, gz_noise_statistics* out, int32_t threads);

// The largest frame of these parts, with its header.
GZ_API uint64_t gz_noise_bound(const gz_noise_part* parts, uint64_t count);

// A frame to be written: its parts and its slot.
typedef struct {
    const gz_noise_part* parts;
    uint64_t count;
    uint8_t* out;
    uint64_t slot;
    int32_t framed;    // non-zero: with the header of docs/format.md, "Frame", in front; else the body alone
    int32_t poisoned;  // in: everything shall decode to NaN; out: it will
    int32_t notch;     // out
    uint64_t size;     // out: bytes written
} gz_noise_frame;

// What a receiver asks of a frame.
typedef struct {
    uint32_t step, digest;
} gz_noise_id;

// Writes all frames, each at the first notch at which it fits its slot. Returns 0.
GZ_API int64_t gz_noise_encode(gz_noise_frame* frames, uint64_t count, uint32_t step, uint32_t digest, int32_t threads);

// Reads a frame, or a body, into the values of its parts, divided by `divisor`; or adds it to them. A frame may be
// shorter than `size`, a body must not. expected: NULL if any step and program will do. squares, unless it is NULL or the
// frame is added, becomes the sum of the squares of what was written, without its last rounding; NaN if a value is not
// finite. Returns 0.
GZ_API int64_t gz_noise_decode(const uint8_t* frame, uint64_t size, int32_t framed, const gz_noise_id* expected,
                               const gz_noise_part* parts, uint64_t count, int32_t add, uint32_t divisor, double* squares,
                               int32_t threads);

// What one rank has of some parts: a frame, or its own values, which count as they are.
typedef struct {
    const uint8_t* data;
    uint64_t size;
    int32_t framed;
    const gz_noise_part* parts;  // values and levels; NULL: a frame
} gz_noise_term;

// Adds the terms in their order and writes the sum into `frame`, block by block without leaving the cache. Of its parts
// only n, shape, start, key and offset count. Returns 0, or an error and in *failed the number of the term at fault.
GZ_API int64_t gz_noise_reduce(const gz_noise_term* terms, uint64_t term_count, const gz_noise_id* expected,
                               gz_noise_frame* frame, uint32_t step, uint32_t digest, uint64_t* failed);

// Of each tensor: the shape that its second moments give, n int8 from -12 to 0, and in `found` 1; or 0 where one of them is
// negative or not finite, or all are 0. Returns 0.
GZ_API int64_t gz_noise_shapes(const float* const* second, const uint64_t* n, int8_t* const* shape, uint8_t* found,
                               uint64_t count, int32_t threads);

// --- Block-scaled codes (docs/format.md), of int8, int4 and fp8 ---

// Values of one tensor that lie in a frame one behind the other.
typedef struct {
    const float* values;  // a rank's own; NULL where they are not used
    float* out;           // where decoded values go
    uint64_t n;
    uint64_t start;       // index of the first value in its tensor
    uint64_t key;         // of the draws
    uint64_t signs;       // key of the signs of a Hadamard transform
    uint64_t scale_at;    // number of its first scale in the frame
    uint64_t code_at;     // byte of its first code
    uint32_t offset;      // added to the draws
    uint32_t padding;
} gz_scaled_part;

// Codes all parts: their own values if term_count is 0, else the sum of the terms in their order, divided by `divisor`.
// A term is a frame of `size` bytes, or NULL for the own values. The result goes into the frame `out`, or, if that is
// NULL, into the parts' `out`. kind: 0 int8, 1 int4, 2 fp8. Returns 0.
GZ_API int64_t gz_scaled_code(int32_t kind, int32_t block, int32_t hadamard, const gz_scaled_part* parts, uint64_t count,
                              const uint8_t* const* terms, uint64_t term_count, uint32_t divisor, uint8_t* out,
                              uint64_t size, int32_t threads);

// The instruction set in use ("scalar", "avx2", "avx512"), what this processor offers (comma-separated), and a
// way to choose one; gz_set_isa returns GZ_BAD_ARGUMENT for a name that is not offered.
GZ_API const char* gz_isa(void);
GZ_API const char* gz_available_isas(void);
GZ_API int64_t gz_set_isa(const char* name);

#ifdef __cplusplus
}
#endif
#endif
