// A file of a trace's events that is damaged anywhere: it is refused, or read.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/trace_store.h"
#include "damage.h"

namespace farandole::fuzz {
namespace {

/// The file of a rank that has recorded a little, made once.
struct File {
  File() {
    char folder[] = "/tmp/farandole-fuzz-XXXXXX";
    if (::mkdtemp(folder) == nullptr) std::abort();
    TraceStore store({folder, 7, 0, 2, "host"});
    TraceHead& head = store.head();
    head.rows.store(1);
    head.tracks.store(1);
    head.row[0].thread = 1;
    head.row[0].written.store(3);
    for (size_t i = 0; i < 3; ++i) store.events(0)[i].kind = static_cast<TraceKind>(i);
    events_at = static_cast<off_t>(reinterpret_cast<std::byte*>(store.events(0)) -
                                   reinterpret_cast<std::byte*>(&head));
    path = store.path();
    descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    good.resize(static_cast<size_t>(events_at) + 3 * sizeof(TraceEvent));
    if (::pread(descriptor, good.data(), good.size(), 0) < 0) std::abort();
  }
  ~File() {
    ::unlink(path.c_str());
    ::rmdir(path.substr(0, path.rfind('/')).c_str());
  }
  static File& file() {
    static File one;
    return one;
  }
  std::string path;
  int descriptor = -1;
  off_t events_at = 0;
  Bytes good;
};

void read_damaged(FuzzedDataProvider& input) {
  File& file = File::file();
  std::vector<std::pair<size_t, std::byte>> before;
  for (int i = 0; i < 8 && input.remaining_bytes() > 0; ++i) {
    const bool of_event = input.ConsumeBool();
    const size_t first = of_event ? static_cast<size_t>(file.events_at) : 0;
    const size_t last = of_event ? file.good.size() - 1 : sizeof(TraceHead) - 1;
    const size_t at = input.ConsumeIntegralInRange(first, last);
    const auto byte = input.ConsumeIntegral<uint8_t>();
    if (::pwrite(file.descriptor, &byte, 1, static_cast<off_t>(at)) != 1) std::abort();
    before.emplace_back(at, file.good[at]);
  }
  refused([&] {
    const TraceStore store(file.path);
    store.part(input.ConsumeBool());
  });
  for (const auto& [at, byte] : before)
    if (::pwrite(file.descriptor, &byte, 1, static_cast<off_t>(at)) != 1) std::abort();
}

}  // namespace
}  // namespace farandole::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace farandole::fuzz;
  FuzzedDataProvider input(data, size);
  read_damaged(input);
  return 0;
}
