// Weights become masters on the device, where somebody else changed them.
#pragma once

#include <limits>

#include "cuda/adam.h"

namespace mlp_offload::cuda {
namespace {

// A remainder starts again whatever it was; an fp32 master only where it does not round to the weight.
template <class Main>
__device__ inline void restart_quad(const AdamRow& row, const Quad& quad) {
  Main* const main_param = static_cast<Main*>(row.main_param) + quad.first;
  if constexpr (adam::is_remainder<Main>) {
    float* const exp_avg_sq = row.exp_avg_sq + quad.first;
    const Main p[4] = {};
    float v[4] = {};
    load(v, exp_avg_sq, quad.count);
    for (int i = 0; i != 4; ++i) v[i] = Rounded::magnitude(v[i]);
    store(main_param, p, quad.count);
    store(exp_avg_sq, v, quad.count);
  } else {
    float p[4] = {}, w[4] = {};
    load(p, main_param, quad.count);
    load_as(row.weight_dtype, w, row.weight, quad.first, quad.count);
    for (int i = 0; i != 4; ++i) {
      float rounded = p[i];
      if (row.weight_dtype == kBf16) {
        Bf16 narrow;
        Rounded::store(&narrow, p[i]);
        rounded = Rounded::load(&narrow);
      } else if (row.weight_dtype == kFp16) {
        Fp16 narrow;
        Rounded::store(&narrow, p[i]);
        rounded = Rounded::load(&narrow);
      }
      if (!(rounded == w[i])) p[i] = w[i];
    }
    store(main_param, p, quad.count);
  }
}

template <class Main>
__global__ void __launch_bounds__(kThreads) restart_masters(const Batch<AdamRow> __grid_constant__ batch) {
  const AdamRow& row = row_of_block(batch);
  const unsigned past = elements_past(reinterpret_cast<std::uintptr_t>(row.exp_avg), sizeof(float));
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x - row.first_block) * kTileQuads + threadIdx.x;
  for (unsigned i = 0; i != kQuadsPerThread; ++i) {
    const Quad quad(begin + i * kThreads, past, row.numel);
    if (quad.count > 0) restart_quad<Main>(row, quad);
  }
}

// Gradients and groups of the segments mean nothing here.
inline void run_restart(std::uint64_t state_address, std::int64_t stride_numel, std::int64_t main_itemsize,
                        const adam::Segment* segments, std::int64_t segment_count, std::uint64_t stream) {
  adam::check_update(state_address, stride_numel, main_itemsize, segments, segment_count,
                     std::numeric_limits<std::int64_t>::max());
  for (const adam::Segment* s = segments; s != segments + segment_count; ++s) {
    adam::check(s->weight_address != 0, s - segments, *s, "there is no weight to start from");
  }
  char* const state = reinterpret_cast<char*>(state_address);
  float* const exp_avg = reinterpret_cast<float*>(state + stride_numel * main_itemsize);
  const auto kernel =
      main_itemsize == sizeof(adam::Remainder) ? restart_masters<adam::Remainder> : restart_masters<float>;
  Batcher<AdamRow> rows(
      [&](const Batch<AdamRow>& batch) { launch(kernel, batch.block_count, kThreads, stream, batch); });
  for (const adam::Segment* s = segments; s != segments + segment_count; ++s) {
    float* const m = exp_avg + s->offset_numel;
    rows.add({state + s->offset_numel * main_itemsize, m, m + stride_numel, nullptr,
              reinterpret_cast<void*>(s->weight_address), s->numel, 0, 0, static_cast<std::int16_t>(s->weight_dtype),
              adam::Scalars{}},
             elements_past(reinterpret_cast<std::uintptr_t>(m), sizeof(float)));
  }
  rows.finish();
}

}  // namespace
}  // namespace mlp_offload::cuda
