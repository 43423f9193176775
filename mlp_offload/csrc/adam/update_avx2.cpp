// Eight elements at a time: AVX2 with FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#define ADAM_TARGET __attribute__((target("avx2,fma,f16c")))
#include "adam/update_body.h"

namespace mlp_offload::adam {
namespace {

struct Avx2 {
  static constexpr std::size_t width = 8;
  using Register = __m256;
  ADAM_INLINE __m256 broadcast(float x) { return _mm256_set1_ps(x); }
  ADAM_INLINE __m128i load_16(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }
  ADAM_INLINE void store_16(void* to, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(to), x); }

  ADAM_INLINE __m256 load(const float* x) { return _mm256_loadu_ps(x); }
  ADAM_INLINE __m256 load(const Bf16* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(x)), 16));
  }
  ADAM_INLINE __m256 load(const Fp16* x) { return _mm256_cvtph_ps(load_16(x)); }

  ADAM_INLINE void store(float* to, __m256 x) { _mm256_storeu_ps(to, x); }
  // bf16 in the lower half of each element, the upper half zero. Not the bf16 conversion instruction, which flushes
  // denormals.
  ADAM_INLINE __m256i round_to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
  }
  // Elements below 2^16, as 16-bit words.
  ADAM_INLINE __m128i narrow(__m256i x) {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  ADAM_INLINE void store(Bf16* to, __m256 x) { store_16(to, narrow(round_to_bf16(x))); }
  ADAM_INLINE void store(Fp16* to, __m256 x) {
    store_16(to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  ADAM_INLINE __m256 magnitude(__m256 x) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
  }
  ADAM_INLINE __m256 join(const Bf16* weight, const Remainder* remainder, __m256 stored_sq) {
    const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(weight)), 16);
    const __m256i sign = _mm256_srli_epi32(_mm256_castps_si256(stored_sq), 31);
    const __m256i low = _mm256_cvtepu16_epi32(load_16(remainder));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_sub_epi32(high, _mm256_slli_epi32(sign, 16)), low));
  }
  ADAM_INLINE void split(__m256 master, __m256 exp_avg_sq, Bf16* weight, Remainder* remainder, float* stored_sq) {
    const __m256i bits = _mm256_castps_si256(master);
    const __m256i high = round_to_bf16(master);
    store_16(weight, narrow(high));
    store_16(remainder, narrow(_mm256_and_si256(bits, _mm256_set1_epi32(0xffff))));
    const __m256i same = _mm256_cmpeq_epi32(high, _mm256_srli_epi32(bits, 16));
    const __m256i number = _mm256_castps_si256(_mm256_cmp_ps(master, master, _CMP_ORD_Q));
    const __m256i sign = _mm256_slli_epi32(_mm256_andnot_si256(same, number), 31);
    store(stored_sq, _mm256_or_ps(magnitude(exp_avg_sq), _mm256_castsi256_ps(sign)));
  }

  ADAM_INLINE __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  ADAM_INLINE __m256 sub(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }
  ADAM_INLINE __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  ADAM_INLINE __m256 div(__m256 a, __m256 b) { return _mm256_div_ps(a, b); }
  ADAM_INLINE __m256 sqrt(__m256 a) { return _mm256_sqrt_ps(a); }
  ADAM_INLINE __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace

const UpdateTable& avx2_table() {
  static constexpr UpdateTable table = make_table<Avx2>();
  return table;
}

}  // namespace mlp_offload::adam
#endif
