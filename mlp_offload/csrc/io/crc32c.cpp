#include "io/crc32c.h"

#include <array>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace mlp_offload::io {
namespace {

// [Note: polynomials as words] A word stands for a polynomial over GF(2) of degree < 32 in reflected order: bit 31 is
// x^0, bit 0 is x^31. Multiplying by x is a shift to the right, reduced by P when x^31 falls out. Appending n zero
// bytes to a message multiplies its checksum register by x^(8n) mod P, so two parts can be joined from checksums alone.
constexpr uint32_t kPolynomial = 0x82F63B78u;
constexpr uint32_t kOne = 1u << 31;

constexpr uint32_t times_x(uint32_t a) { return (a & 1u) ? (a >> 1) ^ kPolynomial : a >> 1; }

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t term = kOne; term != 0; term >>= 1) {
    if (a & term) product ^= b;
    b = times_x(b);
  }
  return product;
}

// x^(8 * nbytes) mod P by repeated squaring.
constexpr uint32_t zero_bytes(uint64_t nbytes) {
  uint32_t result = kOne;
  for (uint32_t square = kOne >> 8; nbytes != 0; nbytes >>= 1) {
    if (nbytes & 1u) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

// tables[k][byte]: the register's change from `byte` followed by k zero bytes.
using Slices = std::array<std::array<uint32_t, 256>, 8>;

const Slices& slices() {
  static const Slices tables = [] {
    Slices t{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) value = times_x(value);
      t[0][byte] = value;
    }
    for (size_t k = 1; k < t.size(); ++k)
      for (size_t byte = 0; byte < 256; ++byte) t[k][byte] = (t[k - 1][byte] >> 8) ^ t[0][t[k - 1][byte] & 0xFFu];
    return t;
  }();
  return tables;
}

uint32_t update_portable(uint32_t state, const unsigned char* p, uint64_t nbytes) {
  const Slices& t = slices();
  for (; nbytes >= 8; p += 8, nbytes -= 8) {
    state ^= uint32_t{p[0]} | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24;
    state = t[7][state & 0xFFu] ^ t[6][(state >> 8) & 0xFFu] ^ t[5][(state >> 16) & 0xFFu] ^ t[4][state >> 24] ^
            t[3][p[4]] ^ t[2][p[5]] ^ t[1][p[6]] ^ t[0][p[7]];
  }
  for (; nbytes != 0; ++p, --nbytes) state = (state >> 8) ^ t[0][(state ^ *p) & 0xFFu];
  return state;
}

#if defined(__x86_64__)

// The crc32 instruction takes one word a cycle but answers after three: three independent streams keep it busy.
constexpr uint64_t kStreamBytes = 4096;

// Multiplication by x^(8 * nbytes) as four look-ups, because it is linear in the bits of the register.
class ZeroBytes {
 public:
  explicit ZeroBytes(uint64_t nbytes) {
    const uint32_t factor = zero_bytes(nbytes);
    for (size_t k = 0; k < 4; ++k)
      for (uint32_t byte = 0; byte < 256; ++byte) table_[k][byte] = multiply(byte << (8 * k), factor);
  }
  uint32_t operator()(uint32_t state) const {
    return table_[0][state & 0xFFu] ^ table_[1][(state >> 8) & 0xFFu] ^ table_[2][(state >> 16) & 0xFFu] ^
           table_[3][state >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> table_{};
};

inline uint64_t word_at(const unsigned char* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

__attribute__((target("sse4.2"))) uint32_t update_sse42(uint32_t state, const unsigned char* p, uint64_t nbytes) {
  static const ZeroBytes one_stream(kStreamBytes), two_streams(2 * kStreamBytes);
  for (; nbytes >= 3 * kStreamBytes; p += 3 * kStreamBytes, nbytes -= 3 * kStreamBytes) {
    uint64_t a = state, b = 0, c = 0;
    for (uint64_t i = 0; i < kStreamBytes; i += 8) {
      a = _mm_crc32_u64(a, word_at(p + i));
      b = _mm_crc32_u64(b, word_at(p + kStreamBytes + i));
      c = _mm_crc32_u64(c, word_at(p + 2 * kStreamBytes + i));
    }
    state = two_streams(static_cast<uint32_t>(a)) ^ one_stream(static_cast<uint32_t>(b)) ^ static_cast<uint32_t>(c);
  }
  uint64_t tail = state;
  for (; nbytes >= 8; p += 8, nbytes -= 8) tail = _mm_crc32_u64(tail, word_at(p));
  state = static_cast<uint32_t>(tail);
  for (; nbytes != 0; ++p, --nbytes) state = _mm_crc32_u8(state, *p);
  return state;
}

#endif

using Update = uint32_t (*)(uint32_t, const unsigned char*, uint64_t);

Update fastest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return update_sse42;
#endif
  return update_portable;
}

}  // namespace

uint32_t crc32c(const void* data, uint64_t nbytes, uint32_t initial) {
  static const Update update = fastest();
  return ~update(~initial, static_cast<const unsigned char*>(data), nbytes);
}

uint32_t crc32c_portable(const void* data, uint64_t nbytes, uint32_t initial) {
  return ~update_portable(~initial, static_cast<const unsigned char*>(data), nbytes);
}

uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t nbytes_b) {
  return multiply(crc_a, zero_bytes(nbytes_b)) ^ crc_b;
}

}  // namespace mlp_offload::io
