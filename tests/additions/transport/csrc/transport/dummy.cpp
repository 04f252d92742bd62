// Row "a transport" of CONTRIBUTING.md: what there is, in the heap or in the segment, by another
// name. Every connection adds a letter to the file FARANDOLE_TEST_DUMMY, so that a test sees it, or
// raises the dummy of row "a kind of error".
#include <cstdlib>
#include <fstream>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "transport/shm.h"
#include "transport/transports.h"

namespace farandole {
namespace {

class Dummy : public Transport {
 public:
  explicit Dummy(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  std::string_view name() const override { return "dummy"; }
  bool reaches(const PeerInfo& peer) const override { return inner_->reaches(peer); }
  std::unique_ptr<Connecting> connect(const PeerInfo& peer, uint64_t stream_key,
                                      int lanes) override {
    const char* told = std::getenv("FARANDOLE_TEST_DUMMY");
    const std::string_view file = told != nullptr ? told : "";
    if (file == "raise") throw Error(ErrorCode::dummy, "the dummy raises");
    if (!file.empty()) std::ofstream(told, std::ios::app) << 'c';
    return inner_->connect(peer, stream_key, lanes);
  }

 private:
  std::unique_ptr<Transport> inner_;
};

}  // namespace

std::unique_ptr<Transport> make_dummy(const Surroundings& here) {
  if (!here.hub && !here.arena) return nullptr;
  return std::make_unique<Dummy>(here.hub ? inproc_transport(here.hub, here.rank)
                                          : shm_transport(here.arena, here.rank, here.host));
}

}  // namespace farandole
