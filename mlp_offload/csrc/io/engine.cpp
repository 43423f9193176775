#include "io/engine.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <limits>
#include <stdexcept>
#include <system_error>

namespace mlp_offload::io {
namespace {

constexpr uint64_t kLargestBlock = uint64_t{1} << 30;
constexpr double kDestructorSeconds = 2.0;

void check(const Settings& s) {
  const auto refuse = [](const std::string& text) { throw std::invalid_argument(text); };
  if (s.threads < 1 || s.threads > 1024) refuse("threads is " + std::to_string(s.threads) + "; use 1 to 1024");
  if (s.iodepth < 1 || s.iodepth > 4096) refuse("iodepth is " + std::to_string(s.iodepth) + "; use 1 to 4096");
  if (s.alignment < 1 || (s.alignment & (s.alignment - 1)) != 0)
    refuse("alignment is " + std::to_string(s.alignment) + "; use a power of two");
  if (s.block_bytes < 1 || s.block_bytes > kLargestBlock)
    refuse("block_size is " + std::to_string(s.block_bytes) + " bytes; use 1 to " + std::to_string(kLargestBlock));
  if (s.direct && s.block_bytes % s.alignment != 0)
    refuse("block_size is " + std::to_string(s.block_bytes) + " bytes; direct I/O needs a multiple of the alignment " +
           std::to_string(s.alignment));
}

std::shared_ptr<Core> make_core(const std::string& kind, const Settings& settings) {
  check(settings);
  if (kind == "threads") return make_threads(settings);
  if (kind == "io_uring") return make_uring(settings);
  if (kind == "null") return make_null(settings);
  throw std::invalid_argument("engine is '" + kind + "'; use threads, io_uring or null");
}

// Signals are for the program's own threads: ours start with all of them blocked.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    const int error = pthread_sigmask(SIG_SETMASK, &all, &before_);
    if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_sigmask");
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Engine::Engine(const std::string& kind, const Settings& settings)
    : kind(kind), owner_(getpid()), core_(make_core(kind, settings)) {
  const SignalsBlocked blocked;
  try {
    for (unsigned i = 0; i < core_->thread_count(); ++i)
      threads_.emplace_back([core = core_] { core->run(); });
  } catch (...) {
    close(kDestructorSeconds);  // nothing is queued, so the threads that did start end at once
    throw;
  }
}

bool Engine::in_child() const { return getpid() != owner_; }

Engine::~Engine() {
  if (in_child()) {
    // The threads do not exist here and their locks may be held for ever: leave everything as it is.
    new std::shared_ptr<Core>(std::move(core_));
    new std::vector<std::thread>(std::move(threads_));
    return;
  }
  if (!close(kDestructorSeconds))
    for (std::thread& thread : threads_) thread.detach();  // see [Note: who keeps the core alive]
}

RequestPtr Engine::submit(Operation operation, uint64_t offset, char* address, uint64_t nbytes, bool checksum) {
  if (in_child())
    throw std::logic_error("the I/O engine of " + core_->settings.path + " belongs to the parent process; open another");
  constexpr uint64_t kEnd = std::numeric_limits<int64_t>::max();
  const Settings& s = core_->settings;
  const uint64_t position = reinterpret_cast<uintptr_t>(address);
  const auto refuse = [&](const std::string& reason) {
    throw std::invalid_argument(std::string(name_of(operation)) + " " + s.path + " offset=" + std::to_string(offset) +
                                " address=" + std::to_string(position) + " bytes=" + std::to_string(nbytes) + ": " +
                                reason);
  };
  if (offset > kEnd || nbytes > kEnd - offset) refuse("the end is past the largest file offset");
  if (nbytes != 0 && address == nullptr) refuse("the address is null");
  if (s.direct && ((offset | position | nbytes) & (s.alignment - 1)) != 0)
    refuse("direct I/O needs multiples of the alignment " + std::to_string(s.alignment));
  const bool moves_bytes = kind != "null";
  auto request =
      std::make_shared<Request>(operation, offset, address, nbytes, checksum && moves_bytes, s.block_bytes);
  core_->enqueue(request);
  return request;
}

bool Engine::register_buffers(char* address, uint64_t nbytes) {
  if (in_child() || address == nullptr || nbytes == 0) return false;
  return core_->register_buffers(address, nbytes);
}

std::vector<InFlight> Engine::in_flight() const {
  return in_child() ? std::vector<InFlight>{} : core_->in_flight();
}

bool Engine::close(double timeout_seconds) {
  if (in_child()) return true;
  std::lock_guard<std::mutex> lock(close_mutex_);
  if (!core_->drain(timeout_seconds)) return false;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  core_->release();
  return true;
}

}  // namespace mlp_offload::io
