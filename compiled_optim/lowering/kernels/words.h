#include <cmath>
#include <cstdint>
#include <cstring>

// Integers of 32 bits wrap around. Where their sign matters, two's complement has it.
static inline uint32_t shift_right_(uint32_t x, uint32_t count) { return uint32_t(int32_t(x) >> count); }
static inline int32_t most(int32_t x, int32_t y) { return x > y ? x : y; }  // of one type, which is one instruction
static inline int32_t least(int32_t x, int32_t y) { return x < y ? x : y; }
static inline uint32_t maximum_(uint32_t x, uint32_t y) { return uint32_t(most(int32_t(x), int32_t(y))); }
static inline uint32_t minimum_(uint32_t x, uint32_t y) { return uint32_t(least(int32_t(x), int32_t(y))); }
static inline uint32_t absolute_(uint32_t x) { return uint32_t(__builtin_abs(int32_t(x))); }
static inline uint32_t integer_(float x) { return uint32_t(int32_t(x)); }
static inline float number_(uint32_t x) { return float(int32_t(x)); }
template <class T> static inline T broadcast_(T x) { return x; }
template <int64_t N> struct Known { constexpr operator int64_t() const { return N; } };  // a number that loops know

template <class T> static inline T sqrt_(T x) { return std::sqrt(x); }
template <class T> static inline T absolute_(T x) { return std::fabs(x); }
template <class T> static inline T sign_(T x) { return T(x > 0) - T(x < 0); }
template <class T> static inline T floor_(T x) { return std::floor(x); }
template <class T> static inline T power_(T x, T y) { return std::pow(x, y); }
template <class T> static inline T maximum_(T x, T y) { const T r = x > y ? x : y; return x != x ? x : r; }
template <class T> static inline T minimum_(T x, T y) { const T r = x < y ? x : y; return x != x ? x : r; }
template <class T> static inline T where_(bool condition, T x, T y) { return condition ? x : y; }
static inline double where_(bool condition, float x, double y) { return condition ? x : y; }
template <class T> static inline T product_(T x, T y) { const T p = x * y; return p == p ? p : T(0); }
template <class T> static inline T bias_correction_(T beta, T step) { return -std::expm1(step * std::log(beta)); }

static inline double double_of(int64_t bits) { double x; std::memcpy(&x, &bits, 8); return x; }
static inline float from_bits(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline uint32_t to_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

static inline float from_bits_(uint32_t bits) { return from_bits(bits); }
static inline float from_upper_(uint32_t bits) { return from_bits(bits & 0xffff0000); }
static inline uint32_t bits_(float x) { return to_bits(x); }

// Two numbers of 16 bits, or of 8, at the address of the first one.
typedef uint32_t __attribute__((aligned(2), may_alias)) pair32;
typedef uint16_t __attribute__((aligned(1), may_alias)) pair16;

struct bfloat16 {
  uint16_t bits;
  operator float() const { return from_bits(uint32_t(bits) << 16); }
  bfloat16() = default;
  static bfloat16 of_bits(uint32_t bits) { bfloat16 x; x.bits = uint16_t(bits >> 16); return x; }
  static uint32_t upper_of(float x) {  // rounded to nearest, ties to even; the lower bits are anything
    const uint32_t u = to_bits(x);
    return x != x ? 0x7fc00000 : u + 0x7fff + ((u >> 16) & 1);
  }
  explicit bfloat16(float x) : bits(uint16_t(upper_of(x) >> 16)) {}
};

struct float16 {
  uint16_t bits;
  operator float() const { return value(bits); }
  static float value(uint32_t bits) {  // the multiplication by 2^112 also normalizes subnormal numbers
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;
    const float finite = from_bits(magnitude) * from_bits(0x77800000);
    const float special = from_bits(magnitude | 0x7f800000);
    const float x = (bits & 0x7c00) == 0x7c00 ? special : finite;
    return from_bits(to_bits(x) | (uint32_t(bits & 0x8000) << 16));
  }
  float16() = default;
  explicit float16(float x) {  // round to nearest, ties to even
    const uint32_t u = to_bits(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    const uint32_t normal = (magnitude + 0xc8000fff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    const uint32_t overflow = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    bits = uint16_t(sign | (magnitude >= 0x477ff000 ? overflow : finite));
  }
};

static inline uint32_t bits_of(float x) { return to_bits(x); }
static inline uint32_t bits_of(bfloat16 x) { return x.bits; }
static inline uint32_t bits_of(float16 x) { return x.bits; }

// Set the bits of elements that changed: of one for each of `changed`, or of two, whose changes are its lower and upper half.
static inline __attribute__((always_inline)) void mark(uint32_t* __restrict words, const uint32_t* changed, int64_t count) {
  for (int64_t from = 0; from < count; from += 32) {
    uint32_t word = 0;
    if (count - from >= 32) {
#pragma omp simd reduction(| : word)
      for (int64_t i = 0; i < 32; i++) word |= uint32_t(changed[from + i] != 0) << i;
    } else {
      for (int64_t i = 0; i < count - from; i++) word |= uint32_t(changed[from + i] != 0) << i;
    }
    words[from / 32] |= word;
  }
}
template <int64_t size> static inline __attribute__((always_inline)) void mark_pairs(uint32_t* __restrict words, const uint32_t* changed, int64_t count) {
  uint8_t flags[2 * size];
  const pair16* const halves = reinterpret_cast<const pair16*>(changed);
  for (int64_t i = 0; i < 2 * size; i++) flags[i] = halves[i] != 0;
  for (int64_t w = 0; w < (count + 15) / 16; w++) {
    uint32_t word = 0;
    for (int64_t i = 0; i < 4; i++) {
      uint64_t eight;
      std::memcpy(&eight, flags + 32 * w + 8 * i, sizeof eight);
      word |= uint32_t((eight * 0x0102040810204080) >> 56) << (8 * i);
    }
    words[w] |= word;
  }
}

// Add `count` numbers to 32 sums, in an order that does not depend on the processor.
template <class T> static inline __attribute__((always_inline)) void add_in_lanes(T* __restrict lanes, const T* numbers, int64_t count) {
  for (int64_t from = 0; from < count; from += 32) {
    if (count - from >= 32) {
#pragma omp simd
      for (int64_t i = 0; i < 32; i++) lanes[i] += numbers[from + i];
    } else {
      for (int64_t i = 0; i < count - from; i++) lanes[i] += numbers[from + i];
    }
  }
}
template <class T> static inline double sum_of(const T* lanes) {
  double sum = 0;
  for (int64_t i = 0; i < 32; i++) sum += double(lanes[i]);
  return sum;
}

// Protected, so that a kernel calls its own functions, even if the process has loaded others of the same name. The last
// arguments are the number of programs, which are loops here, and of threads.
#define OURS extern "C" __attribute__((visibility("protected")))

template <class P> static inline P* at(const int64_t* table, int64_t row, int64_t count, int64_t t) {
  return reinterpret_cast<P*>(table[row * count + t]);
}

template <class P> static double sum_of_squares(const P* __restrict grads, int64_t size) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; i++) {
    const double x = double(grads[i]);
    sum += x * x;
  }
  return sum;
}

OURS void average(const double* sums, const int64_t* ranges, const int64_t* grads, const double* outcome, double* k,
                  int64_t block_count, int64_t columns, int64_t first, int64_t range_count, int64_t width, int64_t) {
  if (outcome[1]) return;
  for (const int64_t* range = ranges; range < ranges + 4 * range_count; range += 4)
    for (int64_t i = 0; i < width && grads[range[0]]; i++) {
      double sum = 0;
      for (int64_t c = range[1]; c < range[2]; c++) sum += sums[i * block_count + c];
      k[(first + i) * columns + range[0]] = sum / double(range[3]);
    }
}
