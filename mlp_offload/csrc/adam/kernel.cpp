#include "adam/kernel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace mlp_offload::adam {
namespace {

struct Variant {
  const char* name;
  bool usable;
  const UpdateTable& (*table)();
};

// Fastest first.
std::vector<Variant> known_variants() {
  std::vector<Variant> known;
#if defined(__x86_64__)
  __builtin_cpu_init();
  known.push_back({"avx512",
                   __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"),
                   avx512_table});
  // Every processor with AVX2 and FMA has F16C, which older compilers cannot ask for by name.
  known.push_back({"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), avx2_table});
#endif
  known.push_back({"scalar", true, scalar_table});
  return known;
}

const UpdateTable& table_of(const std::string& name) {
  std::string usable;
  for (const Variant& variant : known_variants()) {
    if (!variant.usable) continue;
    if (name == variant.name) return variant.table();
    usable += std::string(usable.empty() ? "" : ", ") + variant.name;
  }
  throw std::invalid_argument("Adam variant '" + name + "' is unknown or not run by this processor; use one of " +
                              usable);
}

// The default floating-point environment (round to nearest, denormals kept) while it lives: a library or
// torch.set_flush_denormal may have changed this thread's, and results must not depend on the thread.
class DefaultFloatEnvironment {
 public:
#if defined(__x86_64__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

// Long chunks let the processor's prefetchers run (1 MiB of each fp32 stream costs no bandwidth, 64 KiB up to a third
// with two threads); short ones balance the threads. Several a thread, between these bounds.
constexpr std::int64_t kMinChunkNumel = 16384, kMaxChunkNumel = 262144, kChunksPerThread = 8;

std::int64_t chunk_numel(std::int64_t total_numel, int threads) {
  const std::int64_t wanted = total_numel / (kChunksPerThread * threads) / kMinChunkNumel * kMinChunkNumel;
  return std::min(std::max(wanted, kMinChunkNumel), kMaxChunkNumel);
}

struct Chunk {
  Run run;
  UpdateFunction update;
  const Scalars* scalars;
};

// Cuts fall on multiples of `chunk` elements in the subgroup, so every chunk but a segment's first starts as aligned as
// the record itself.
std::vector<Chunk> cut(const UpdateTable& table, char* state, std::int64_t stride_numel, std::int64_t main_itemsize,
                       const Segment* segments, std::int64_t segment_count, const Scalars* groups, int threads) {
  float* exp_avg = reinterpret_cast<float*>(state + stride_numel * main_itemsize);
  std::int64_t total_numel = 0;
  for (const Segment* s = segments; s != segments + segment_count; ++s) total_numel += s->numel;
  const std::int64_t chunk = chunk_numel(total_numel, threads);
  std::vector<Chunk> chunks;
  for (const Segment* s = segments; s != segments + segment_count; ++s) {
    if (s->grad_address == 0) continue;
    const std::int64_t end = s->offset_numel + s->numel;
    const UpdateFunction update = main_itemsize == sizeof(Remainder)
                                      ? table.update_remainder[s->grad_dtype]
                                      : table.update[s->grad_dtype][s->weight_address ? s->weight_dtype : kDtypeCount];
    for (std::int64_t begin = s->offset_numel; begin < end;) {
      const std::int64_t stop = std::min(end, (begin / chunk + 1) * chunk);
      const std::int64_t done = begin - s->offset_numel;
      float* m = exp_avg + begin;
      const auto grad = static_cast<std::uintptr_t>(s->grad_address + done * dtype_bytes(s->grad_dtype));
      const auto weight = static_cast<std::uintptr_t>(
          s->weight_address ? s->weight_address + done * dtype_bytes(s->weight_dtype) : 0);
      chunks.push_back({{state + begin * main_itemsize, m, m + stride_numel, reinterpret_cast<const void*>(grad),
                         reinterpret_cast<void*>(weight), static_cast<std::size_t>(stop - begin)},
                        update,
                        groups + s->group});
      begin = stop;
    }
  }
  return chunks;
}

}  // namespace

std::vector<std::string> variants() {
  std::vector<std::string> names;
  for (const Variant& variant : known_variants()) {
    if (variant.usable) names.emplace_back(variant.name);
  }
  return names;
}

AdamKernel::AdamKernel(int threads, const std::string& variant)
    : threads_(threads), variant_(variant), table_(table_of(variant)), owner_(getpid()) {
  if (threads < 1) throw std::invalid_argument("Adam threads is " + std::to_string(threads) + "; use 1 or more");
  team_ = std::make_unique<Team>(threads - 1);
}

AdamKernel::~AdamKernel() { close(); }

bool AdamKernel::in_forked_child() const { return getpid() != owner_; }

void AdamKernel::update(std::uint64_t state_address, std::int64_t stride_numel, std::int64_t main_itemsize,
                        const Segment* segments, std::int64_t segment_count, const Scalars* groups,
                        std::int64_t group_count) {
  check_update(state_address, stride_numel, main_itemsize, segments, segment_count, group_count);
  char* state = reinterpret_cast<char*>(static_cast<std::uintptr_t>(state_address));
  const std::vector<Chunk> chunks =
      cut(table_, state, stride_numel, main_itemsize, segments, segment_count, groups, threads_);

  std::atomic<std::size_t> next{0};
  run(
      [&] {
        DefaultFloatEnvironment environment;
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < chunks.size();) {
          chunks[i].update(chunks[i].run, *chunks[i].scalars);
        }
      },
      chunks.size());
}

void AdamKernel::sum_words(const std::int64_t* addresses, const std::int64_t* numels, std::int64_t count,
                           std::uint32_t* sums) {
  struct Part {
    std::int64_t row, begin, end;
  };
  std::vector<Part> parts;
  for (std::int64_t row = 0; row < count; ++row) {
    for (std::int64_t begin = 0; begin < numels[row]; begin += kMaxChunkNumel) {
      parts.push_back({row, begin, std::min(begin + kMaxChunkNumel, numels[row])});
    }
  }
  std::vector<std::uint32_t> found(parts.size());
  std::atomic<std::size_t> next{0};
  run(
      [&] {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts.size();) {
          const Part& part = parts[i];
          const auto* words = reinterpret_cast<const std::uint16_t*>(static_cast<std::uintptr_t>(addresses[part.row]));
          found[i] = table_.sum_words(words + part.begin, static_cast<std::size_t>(part.end - part.begin),
                                      static_cast<std::size_t>(part.begin));
        }
      },
      parts.size());
  std::fill(sums, sums + count, 0u);
  for (std::size_t i = 0; i != parts.size(); ++i) sums[parts[i].row] += found[i];
}

// Every thread of the team runs `job`, which takes chunks until none is left.
void AdamKernel::run(const std::function<void()>& job, std::size_t chunk_count) {
  // [Note: forked child] fork() copies neither the team's threads nor the state of a lock that another thread held:
  // a child touches neither, and works in the calling thread.
  if (in_forked_child()) {
    if (closed_) throw std::logic_error("this Adam kernel is closed");
    return job();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) throw std::logic_error("this Adam kernel is closed");
  if (threads_ == 1 || chunk_count <= 1) return job();
  team_->run(job);
}

void AdamKernel::close() {
  if (in_forked_child()) {
    closed_ = true;
    (void)team_.release();  // its threads are the parent's; destroying what they wait on could hang
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  team_.reset();
}

}  // namespace mlp_offload::adam
