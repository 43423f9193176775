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
  // Not the bf16 conversion instruction, which flushes denormals.
  ADAM_INLINE void store(Bf16* to, __m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high =
        _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
    store_16(to, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
  }
  ADAM_INLINE void store(Fp16* to, __m256 x) {
    store_16(to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
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
