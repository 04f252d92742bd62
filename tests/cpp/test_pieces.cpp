// Operations on the host that run in pieces, which ranks with arrays elsewhere bring one by one.
#include <cstring>
#include <utility>

#include "engines.h"
#include "schedule/slicing.h"
#include "stream/pieces.h"

using namespace farandole;
using testing::run_groups;

namespace {

constexpr size_t kPiece = 100;  // elements

/// Stands for arrays on a device: a piece is here when its gate has been asked a few times.
class Elsewhere : public OnDevices,
                  public PiecesOnDevices,
                  public Gate,
                  public Backend,
                  public std::enable_shared_from_this<Elsewhere> {
 public:
  /// `comes`: so many pieces of it.
  Elsewhere(std::vector<int32_t>& array, bool declines, size_t comes)
      : array_(array), declines_(declines), comes_(comes) {}

  farandole::Backend& backend() override { return *this; }
  bool declines() const override { return declines_; }
  size_t piece() const override { return kPiece; }
  std::shared_ptr<PiecesOnDevices> go_by_host(Operation&, size_t) override {
    return shared_from_this();
  }

  void begin(Operation& piece) override {
    CHECK(!under_way_);
    under_way_ = true;
    here_.assign(array_.begin() + at_, array_.begin() + at_ + static_cast<ptrdiff_t>(piece.count));
    piece.input.data = piece.output.data = reinterpret_cast<std::byte*>(here_.data());
    piece.gate = shared_from_this();
    asked_ = 0;
  }
  void end() override {
    CHECK(std::exchange(under_way_, false));
    CHECK(asked_ >= 3);
    std::copy(here_.begin(), here_.end(), array_.begin() + at_);
    at_ += static_cast<ptrdiff_t>(here_.size());
    ++ended_;
  }
  size_t ended() const { return ended_; }

  bool is_open() override { return ended_ < comes_ && ++asked_ >= 3; }
  std::string awaited() const override { return "its arrays"; }

  std::string_view name() const override { return "elsewhere"; }
  bool can_run(const Operation&) const override { return true; }
  void refuse(const Operation&) const override {}
  std::string ways_for(const Operation&) const override { return ""; }
  void start(const Operation&, uint32_t) override {}
  Progress poll(TimePoint) override { return Progress::finished; }
  std::string declined() const override { return "they lie elsewhere"; }
  std::vector<int> lacking() const override { return {}; }
  void abort() noexcept override {}
  std::string_view way() const override { return "elsewhere"; }

 private:
  std::vector<int32_t>& array_;
  bool declines_;
  size_t comes_;
  std::vector<int32_t> here_;
  ptrdiff_t at_ = 0;
  bool under_way_ = false;
  int asked_ = 0;
  size_t ended_ = 0;
};

std::vector<int32_t> counted_from(int32_t first, size_t count) {
  std::vector<int32_t> data(count);
  for (size_t i = 0; i < count; ++i) data[i] = first + static_cast<int32_t>(i);
  return data;
}

/// `lies`: by rank, 0 here, 1 elsewhere, 2 elsewhere for certain.
void reduce_in_pieces(std::vector<int> lies, size_t count) {
  const auto size = static_cast<int>(lies.size());
  run_groups(size, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    const int rank = group->rank();
    for (int round = 0; round < 3; ++round) {
      std::vector<int32_t> data = counted_from(1000 * rank, count);
      std::vector<int32_t> nowhere(count, -1);
      const int lie = lies[static_cast<size_t>(rank)];
      Options options{{Collective::all_reduce}};
      const auto far = std::make_shared<Elsewhere>(data, lie == 2, count);
      if (lie > 0) options.on_devices = far;
      const Buffer buffer = testing::buffer_of(lie > 0 ? nowhere : data, DType::int32);
      const Handle handle = group->submit(buffer, buffer, options);
      CHECK_EQUAL(testing::error_of(handle), "");
      CHECK_EQUAL(far->ended(), lie > 0 ? (count + kPiece - 1) / kPiece : 0);
      for (size_t i = 0; i < count; ++i)
        CHECK_EQUAL(data[i], 1000 * size * (size - 1) / 2 + size * static_cast<int32_t>(i));
      CHECK(nowhere == std::vector<int32_t>(count, -1));
    }
    group->wait_for(group->submit({}, {}, Options{{Collective::barrier}}), [] {});
  });
}

}  // namespace

TEST(pieces_are_cut_alike_by_all_ranks) {
  for (const size_t count : {kPiece + 1, 2 * kPiece, 7 * kPiece / 2, 30 * kPiece + 1})
    for (const std::vector<int>& lies :
         {std::vector{2}, {2, 2}, {1, 1, 1}, {1, 2}, {0, 2, 1}, {2, 0}})
      reduce_in_pieces(lies, count);
}

TEST(pieces_share_the_time_of_their_operation) {
  run_groups(2, ProgressMode::automatic, [&](const std::shared_ptr<Group>& group) {
    std::vector<int32_t> data = counted_from(0, 5 * kPiece);
    const size_t comes = group->rank() == 1 ? 2 : 5;
    Options options{{Collective::all_reduce}};
    options.name = "gradient";
    options.on_devices = std::make_shared<Elsewhere>(data, true, comes);
    options.deadline = Deadline::after(std::chrono::milliseconds(100));
    const Buffer buffer = testing::buffer_of(data, DType::int32);
    const std::string error = testing::error_of(group->submit(buffer, buffer, options));
    CHECK(error.find("'gradient' was not complete after") != std::string::npos);
    CHECK(error.find("rank 1") != std::string::npos);
    CHECK_EQUAL(data[2 * kPiece], static_cast<int32_t>(2 * kPiece));
  });
}

TEST(cuts_cover_every_share_once) {
  for (const Collective kind : {Collective::reduce_scatter, Collective::all_gather})
    for (const std::vector<size_t>& counts :
         {std::vector<size_t>{5, 0, 12}, {7, 7, 7}, {1, 0, 0}, {3, 4, 3}})
      for (size_t elements = 1; elements < 14; ++elements)
        for (int rank = 0; rank < 3; ++rank) {
          Shape shape;
          shape.rank = rank;
          shape.size = 3;
          shape.counts = counts;
          const Cut cut(kind, shape, elements);
          std::vector<int> seen(5 + 12 + 7, 0);
          size_t own = 0;
          for (size_t i = 0; i < cut.pieces(); ++i) {
            const CutPiece piece = cut[i];
            const bool scatters = kind == Collective::reduce_scatter;
            for (const auto& [at, count] : scatters ? piece.input : piece.output)
              for (size_t n = at; n < at + count; ++n) ++seen[n];
            const auto& alone = scatters ? piece.output : piece.input;
            CHECK(alone.front().count == 0 || alone.front().at == own);
            own += alone.front().count;
            Shape part = shape;
            part.count = piece.count;
            part.counts = piece.counts;
            CHECK_EQUAL(sizes_of(kind, part).input, count_of(piece.input));
            CHECK_EQUAL(sizes_of(kind, part).output, count_of(piece.output));
          }
          const size_t all = counts[0] + counts[1] + counts[2];
          for (size_t n = 0; n < seen.size(); ++n) CHECK_EQUAL(seen[n], n < all ? 1 : 0);
          CHECK_EQUAL(own, counts[static_cast<size_t>(rank)]);
        }
}
