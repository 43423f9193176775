// Sixteen elements at a time: AVX-512.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own header starts its undefined vectors from themselves, and GCC up to 12 warns about that (PR 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#define ADAM_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#include "adam/update_body.h"

namespace mlp_offload::adam {
namespace {

struct Avx512 {
  static constexpr std::size_t width = 16;
  using Register = __m512;
  ADAM_INLINE __m512 broadcast(float x) { return _mm512_set1_ps(x); }
  ADAM_INLINE __m256i load_16(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
  ADAM_INLINE void store_16(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }

  ADAM_INLINE __m512 load(const float* x) { return _mm512_loadu_ps(x); }
  ADAM_INLINE __m512 load(const Bf16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16(x)), 16));
  }
  ADAM_INLINE __m512 load(const Fp16* x) { return _mm512_cvtph_ps(load_16(x)); }

  ADAM_INLINE void store(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
  // bf16 in the upper half of each element; the lower half is undefined. Not the bf16 conversion instruction, which
  // flushes denormals.
  ADAM_INLINE __m512i round_to_bf16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
  }
  ADAM_INLINE void store(Bf16* to, __m512 x) {
    store_16(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(x), 16)));
  }
  ADAM_INLINE void store(Fp16* to, __m512 x) {
    store_16(to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  ADAM_INLINE __m512 magnitude(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
  }
  ADAM_INLINE __m512 join(const Bf16* weight, const Remainder* remainder, __m512 stored_sq) {
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16(weight)), 16);
    const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(stored_sq), 31);
    const __m512i low = _mm512_cvtepu16_epi32(load_16(remainder));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_sub_epi32(high, _mm512_slli_epi32(sign, 16)), low));
  }
  ADAM_INLINE void split(__m512 master, __m512 exp_avg_sq, Bf16* weight, Remainder* remainder, float* stored_sq) {
    const __m512i bits = _mm512_castps_si512(master);
    const __m512i high = _mm512_srli_epi32(round_to_bf16(master), 16);
    store_16(weight, _mm512_cvtepi32_epi16(high));
    store_16(remainder, _mm512_cvtepi32_epi16(bits));
    const __mmask16 up = _mm512_mask_cmpneq_epi32_mask(_mm512_cmp_ps_mask(master, master, _CMP_ORD_Q), high,
                                                       _mm512_srli_epi32(bits, 16));
    const __m512i sign = _mm512_maskz_mov_epi32(up, _mm512_set1_epi32(static_cast<int>(0x80000000u)));
    store(stored_sq, _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude(exp_avg_sq)), sign)));
  }

  ADAM_INLINE __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  ADAM_INLINE __m512 sub(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }
  ADAM_INLINE __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  ADAM_INLINE __m512 div(__m512 a, __m512 b) { return _mm512_div_ps(a, b); }
  ADAM_INLINE __m512 sqrt(__m512 a) { return _mm512_sqrt_ps(a); }
  ADAM_INLINE __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace

const UpdateTable& avx512_table() {
  static constexpr UpdateTable table = make_table<Avx512>();
  return table;
}

}  // namespace mlp_offload::adam
#endif
