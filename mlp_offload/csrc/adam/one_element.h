// Vector types of one element, for the portable variant and for the CUDA kernels: memory and conversions, in integer
// arithmetic, so that they need nothing of the target and give the same bits everywhere. See update_body.h, which is
// included first; as there, no include guard: each source needs its own copy.
namespace mlp_offload::adam {
namespace {

ADAM_INLINE std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

ADAM_INLINE float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// bits >> shift, rounded to nearest, ties to even; 0 < shift < 32.
ADAM_INLINE std::uint32_t shift_right_rne(std::uint32_t bits, unsigned shift) {
  const std::uint32_t kept = bits >> shift;
  const std::uint32_t rest = bits & ((1u << shift) - 1), half = 1u << (shift - 1);
  return kept + (rest > half || (rest == half && (kept & 1u)));
}

ADAM_INLINE std::uint16_t bf16_from(float x) {
  const std::uint32_t bits = bits_of(x);
  return static_cast<std::uint16_t>(x != x ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// fp16: 5 exponent bits (bias 15), 10 fraction bits. A carry out of the fraction moves into the exponent by itself,
// up to the infinity.
ADAM_INLINE std::uint16_t fp16_from(float x) {
  const std::uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x47800000u) {
    half = 0x7c00u;  // 65536 and above, infinity
  } else if (magnitude >= 0x38800000u) {
    half = shift_right_rne(magnitude - (112u << 23), 13);  // normal: 2^-14 and above
  } else if (magnitude >= 0x33000000u) {
    const unsigned exponent = magnitude >> 23;  // denormal: units of 2^-24
    half = shift_right_rne((magnitude & 0x7fffffu) | 0x800000u, 126u - exponent);
  } else {
    half = 0;  // below half of the smallest denormal
  }
  return static_cast<std::uint16_t>(sign | half);
}

ADAM_INLINE float from_fp16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return float_of(sign | (exponent + 112u) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // exact
  return float_of(sign | bits_of(magnitude));
}

// All of a vector type but the arithmetic.
struct OneElement {
  static constexpr std::size_t width = 1;
  using Register = float;
  ADAM_INLINE float broadcast(float x) { return x; }
  ADAM_INLINE float load(const float* x) { return *x; }
  ADAM_INLINE float load(const Bf16* x) { return float_of(static_cast<std::uint32_t>(x->bits) << 16); }
  ADAM_INLINE float load(const Fp16* x) { return from_fp16(x->bits); }
  ADAM_INLINE void store(float* to, float x) { *to = x; }
  ADAM_INLINE void store(Bf16* to, float x) { to->bits = bf16_from(x); }
  ADAM_INLINE void store(Fp16* to, float x) { to->bits = fp16_from(x); }
  ADAM_INLINE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
  ADAM_INLINE float join(const Bf16* weight, const Remainder* remainder, float stored_sq) {
    const std::uint32_t rounded_up = bits_of(stored_sq) >> 31;
    return float_of(((weight->bits - rounded_up) << 16) | remainder->bits);
  }
  ADAM_INLINE void split(float master, float exp_avg_sq, Bf16* weight, Remainder* remainder, float* stored_sq) {
    const std::uint32_t bits = bits_of(master);
    weight->bits = bf16_from(master);
    remainder->bits = static_cast<std::uint16_t>(bits);
    const std::uint32_t rounded_up = master == master && weight->bits != bits >> 16;
    *stored_sq = float_of((bits_of(exp_avg_sq) & 0x7fffffffu) | rounded_up << 31);
  }
};

}  // namespace
}  // namespace mlp_offload::adam
