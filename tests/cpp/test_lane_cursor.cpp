#include <algorithm>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "backends/lane_cursor.h"
#include "base/error.h"
#include "check.h"
#include "transport/shm_channel.h"

using namespace farandole;

namespace {

/// A channel whose behaviour the test sets step by step.
class Scripted : public Channel {
 public:
  size_t write(std::span<const std::byte> bytes) override {
    const size_t count = std::min(bytes.size(), room);
    room -= count;
    written.insert(written.end(), bytes.begin(),
                   bytes.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  bool drained() override {
    ++asked;
    return is_drained;
  }
  bool copies() const override { return does_copy; }
  bool refers() override { return does_copy ? does_refer : !drained(); }
  std::span<const std::byte> peek(size_t at_least) override {
    if (arriving.size() < at_least) return {};
    return arriving;
  }
  void consume(size_t count) override {
    arriving.erase(arriving.begin(), arriving.begin() + static_cast<std::ptrdiff_t>(count));
  }
  PlaceRule place_rule() const override { return rule; }
  void offer(std::byte* at, size_t count) override { offers.emplace_back(at, count); }
  std::optional<std::span<std::byte>> place_for(std::span<const std::byte> bytes) override {
    if (!place) return std::nullopt;
    return place->first(std::min(place->size(), bytes.size()));
  }
  void delivered(size_t count) override { place = place->subspan(count); }

  template <typename T>
  void arrive(const std::vector<T>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    arriving.insert(arriving.end(), bytes.begin(), bytes.end());
  }

  size_t room = SIZE_MAX;
  bool is_drained = true;
  bool does_copy = false, does_refer = false;
  PlaceRule rule{.shortest = kShortestPut, .by_visits = true, .of_exchanges = true};
  mutable int asked = 0;                                     // whether it is drained
  std::vector<std::pair<std::byte*, size_t>> offers;         // that were made to the peer
  std::optional<std::span<std::byte>> place{std::in_place};  // that the peer has offered
  std::vector<std::byte> written, arriving;
};

/// Rank 0 of two, with a scripted channel to rank 1.
struct Stage {
  explicit Stage(size_t count) : input(count), output(count), scratch(count) {
    channels.push_back(nullptr);
    channels.push_back(std::make_unique<Scripted>());
    work = {.rank = 0,
            .input = bytes(input),
            .output = bytes(output),
            .scratch = bytes(scratch),
            .dtype = DType::float32,
            .op = ReduceOp::sum,
            .scales = scales_for(DType::float32, ReduceOp::sum, 10, 100, 2)};
    for (size_t i = 0; i < count; ++i) {
      input[i] = static_cast<float>(i + 1);
      output[i] = scratch[i] = -1;
    }
  }

  static std::byte* bytes(std::vector<float>& values) {
    return reinterpret_cast<std::byte*>(values.data());
  }
  Scripted& peer() { return static_cast<Scripted&>(*channels[1]); }
  LaneCursor run(Lane steps) {
    lane = std::move(steps);
    return LaneCursor(work, lane, channels);
  }

  std::vector<float> input, output, scratch;
  std::vector<std::unique_ptr<Channel>> channels;
  LaneWork work;
  Lane lane;
};

using Floats = std::vector<float>;
constexpr Slice in(size_t offset, size_t count) { return {Space::input, offset, count}; }
constexpr Slice out(size_t offset, size_t count) { return {Space::output, offset, count}; }
constexpr Slice scratch(size_t offset, size_t count) { return {Space::scratch, offset, count}; }

}  // namespace

TEST(cursor_of_an_empty_lane_is_finished_at_once) {
  Stage stage(1);
  CHECK(stage.run({}).poll() == Progress::finished);
}

TEST(cursor_sends_and_stores_independently) {
  Stage stage(4);
  LaneCursor cursor = stage.run({{.to = 1, .send = in(0, 2), .from = 1, .recv = out(2, 2)}});
  stage.peer().room = 0;
  CHECK(cursor.poll() == Progress::idle);
  stage.peer().arrive(Floats{7, 8});
  CHECK(cursor.poll() == Progress::moved);
  CHECK(stage.output == (Floats{-1, -1, 7, 8}));
  CHECK_EQUAL(cursor.bytes_done(), 8U);
  CHECK_EQUAL(cursor.bytes_total(), 16U);
  CHECK_EQUAL(cursor.peer(), 1);
  stage.peer().room = 5;  // in the middle of an element
  CHECK(cursor.poll() == Progress::moved);
  stage.peer().room = SIZE_MAX;
  CHECK(cursor.poll() == Progress::finished);
  CHECK(std::ranges::equal(stage.peer().written, std::as_bytes(std::span(stage.input)).first(8)));
}

TEST(cursor_keeps_a_step_until_its_channel_has_drained) {
  Stage stage(2);
  LaneCursor cursor = stage.run({{.to = 1, .send = out(0, 2)}, {.from = 1, .recv = out(0, 2)}});
  stage.peer().is_drained = false;
  stage.peer().arrive(Floats{7, 8});
  CHECK(cursor.poll() == Progress::moved);
  CHECK(cursor.poll() == Progress::idle);
  CHECK(stage.output == (Floats{-1, -1}));  // still the channel's
  stage.peer().is_drained = true;
  CHECK(cursor.poll() == Progress::finished);
  CHECK(stage.output == (Floats{7, 8}));
}

// ---- sending ahead of what is received ----

/// An all-reduce of two ranks: this one folds the first half, and gets the second.
Lane halves(size_t half) {
  return {{.to = 1,
           .send = in(half, half),
           .from = 1,
           .recv = out(0, half),
           .held = in(0, half),
           .action = Action::fold_upper,
           .leaf_arrived = true,
           .leaf_held = true},
          {.to = 1, .send = out(0, half), .from = 1, .recv = out(half, half)}};
}

size_t floats(const std::vector<std::byte>& bytes) { return bytes.size() / sizeof(float); }

TEST(cursor_sends_what_is_folded_while_more_is_on_its_way) {
  Stage stage(8);
  stage.peer().does_copy = true;
  LaneCursor cursor = stage.run(halves(4));
  CHECK(cursor.poll() == Progress::moved);
  CHECK_EQUAL(floats(stage.peer().written), 4U);  // and no element that is not folded yet
  stage.peer().arrive(Floats{1, 1, 1});
  CHECK(cursor.poll() == Progress::moved);
  CHECK_EQUAL(floats(stage.peer().written), 7U);
  CHECK_EQUAL(cursor.step(), 0U);
  CHECK_EQUAL(cursor.bytes_done(), 28U);
  CHECK_EQUAL(cursor.peer(), 1);
  stage.peer().arrive(Floats{1, 5, 6, 7, 8});
  CHECK(cursor.poll() == Progress::finished);
  CHECK(stage.output == (Floats{20, 30, 40, 50, 5, 6, 7, 8}));
  const auto sent = std::as_bytes(std::span(stage.output)).first(16);
  CHECK(std::ranges::equal(std::span(stage.peer().written).subspan(16), sent));
}

TEST(cursor_does_not_send_ahead_over_a_channel_that_refers_to_memory) {
  Stage stage(8);
  LaneCursor cursor = stage.run(halves(4));
  stage.peer().arrive(Floats{1, 1, 1});
  CHECK(cursor.poll() == Progress::moved);
  CHECK_EQUAL(floats(stage.peer().written), 4U);
}

/// The received span is in the output and the sent one in the input. In place, the two overlap.
TEST(cursor_in_place_does_not_send_what_is_still_to_come) {
  Stage stage(4);
  stage.peer().does_copy = true;
  stage.work.output = stage.work.input;
  LaneCursor cursor = stage.run({{.from = 1, .recv = out(1, 2)}, {.to = 1, .send = in(0, 4)}});
  CHECK(cursor.poll() == Progress::moved);
  CHECK_EQUAL(floats(stage.peer().written), 1U);
  stage.peer().arrive(Floats{7});
  CHECK(cursor.poll() == Progress::moved);
  CHECK_EQUAL(floats(stage.peer().written), 2U);
  stage.peer().arrive(Floats{8});
  CHECK(cursor.poll() == Progress::finished);
  const Floats expected{1, 7, 8, 4};
  CHECK(std::ranges::equal(stage.peer().written, std::as_bytes(std::span(expected))));
}

TEST(cursor_overwrites_only_what_is_sent) {
  for (const bool does_refer : {false, true}) {
    Stage stage(2);
    stage.peer().does_copy = true;
    stage.peer().does_refer = does_refer;
    stage.peer().room = 4;
    LaneCursor cursor = stage.run({{.to = 1, .send = out(0, 2)}, {.from = 1, .recv = out(0, 2)}});
    stage.peer().arrive(Floats{7, 8});
    CHECK(cursor.poll() == Progress::moved);
    CHECK(stage.output == (does_refer ? Floats{-1, -1} : Floats{7, -1}));
    CHECK_EQUAL(cursor.step(), 0U);
    CHECK_EQUAL(cursor.bytes_done(), 4U);
    CHECK_EQUAL(cursor.bytes_total(), 8U);
    std::vector<int> lacking;
    cursor.add_lacking(lacking);
    CHECK(lacking == std::vector<int>{1});
    stage.peer().room = SIZE_MAX;
    CHECK(cursor.poll() == (does_refer ? Progress::moved : Progress::finished));
    stage.peer().does_refer = false;
    CHECK(cursor.poll() == Progress::finished);
    CHECK(stage.output == (Floats{7, 8}));
    const Floats expected{-1, -1};
    CHECK(std::ranges::equal(stage.peer().written, std::as_bytes(std::span(expected))));
  }
}

/// The link back may be faster. Data that arrive over it must not wait in the kernel.
TEST(cursor_receives_the_next_step_while_one_is_still_to_be_sent) {
  Stage stage(8);
  stage.peer().does_copy = true;
  stage.peer().room = 3 * sizeof(float);
  LaneCursor cursor = stage.run(halves(4));
  stage.peer().arrive(Floats{1, 1, 1, 1, 5, 6});
  CHECK(cursor.poll() == Progress::moved);
  CHECK(stage.peer().arriving.empty());
  CHECK(stage.output == (Floats{20, 30, 40, 50, 5, 6, -1, -1}));
  CHECK_EQUAL(cursor.step(), 0U);
  CHECK_EQUAL(cursor.bytes_done(), 28U);
  stage.peer().room = SIZE_MAX;
  stage.peer().arrive(Floats{7, 8});
  CHECK(cursor.poll() == Progress::finished);
  CHECK(stage.output == (Floats{20, 30, 40, 50, 5, 6, 7, 8}));
}

TEST(cursor_sends_past_a_local_step_what_that_leaves_alone) {
  Stage stage(4);
  stage.peer().does_copy = true;
  LaneCursor cursor = stage.run({{.from = 1, .recv = scratch(0, 1)},
                                 {.to = 0, .send = scratch(0, 1), .from = 0, .recv = out(3, 1)},
                                 {.to = 1, .send = in(0, 2)},
                                 {.to = 1, .send = out(2, 2)}});
  CHECK(cursor.poll() == Progress::moved);
  CHECK_EQUAL(floats(stage.peer().written), 3U);
  stage.peer().arrive(Floats{9});
  CHECK(cursor.poll() == Progress::finished);
  const Floats expected{1, 2, -1, 9};
  CHECK(std::ranges::equal(stage.peer().written, std::as_bytes(std::span(expected))));
}

TEST(cursor_asks_for_what_channels_have_copied) {
  Stage stage(4);
  stage.peer().does_copy = true;
  LaneCursor cursor = stage.run({{.to = 1, .send = in(0, 2)}, {.from = 1, .recv = out(0, 2)}, {}});
  CHECK(cursor.poll() == Progress::moved);
  const int asked = stage.peer().asked;
  CHECK(cursor.poll() == Progress::idle);  // the peer may wait for what this rank's channel holds
  CHECK(stage.peer().asked > asked);
}

TEST(cursor_is_finished_when_the_last_bytes_are_on_their_way) {
  Stage stage(2);
  stage.peer().does_copy = true;
  stage.peer().is_drained = false;
  LaneCursor cursor = stage.run({{.to = 1, .send = in(0, 2)}});
  CHECK(cursor.poll() == Progress::moved);
  CHECK(cursor.poll() == Progress::idle);
  std::vector<int> lacking;
  cursor.add_lacking(lacking);
  CHECK(lacking == std::vector<int>{1});
  stage.peer().is_drained = true;
  CHECK(cursor.poll() == Progress::finished);
}

// ---- folding ----

TEST(cursor_folds_whole_elements_and_leaves_the_rest) {
  Stage stage(3);
  stage.output = {1, 2, 3};
  LaneCursor cursor = stage.run({{.from = 1, .recv = out(0, 3), .action = Action::fold_lower}});
  stage.peer().arrive(Floats{10, 20, 30});
  const std::vector<std::byte> last(stage.peer().arriving.end() - 2, stage.peer().arriving.end());
  stage.peer().arriving.resize(10);
  CHECK(cursor.poll() == Progress::moved);
  CHECK(stage.output == (Floats{11, 22, 3}));
  CHECK(cursor.poll() == Progress::idle);
  stage.peer().arriving.insert(stage.peer().arriving.end(), last.begin(), last.end());
  CHECK(cursor.poll() == Progress::finished);
  CHECK(stage.output == (Floats{11, 22, 33}));
}

TEST(cursor_scales_leaves_and_finishes) {
  Stage stage(2);
  // Prescale 10, postscale 100; the held operand is this rank's raw input.
  LaneCursor cursor = stage.run({{.from = 1,
                                  .recv = out(0, 1),
                                  .held = in(0, 1),
                                  .action = Action::fold_upper,
                                  .leaf_arrived = true,
                                  .leaf_held = true},
                                 {.from = 1,
                                  .recv = scratch(1, 1),
                                  .held = in(1, 1),
                                  .action = Action::fold_upper,
                                  .leaf_held = true,
                                  .finish = true},
                                 {.from = 1, .recv = out(1, 1), .leaf_arrived = true}});
  stage.peer().arrive(Floats{5, 6, 7});
  CHECK(cursor.poll() == Progress::finished);
  CHECK(stage.output == (Floats{60, 70}));
  CHECK(stage.scratch == (Floats{-1, 2600}));
  CHECK(stage.input == (Floats{1, 2}));
}

TEST(cursor_holds_an_operand_apart_from_the_result) {
  Stage stage(2);
  stage.scratch = {3, 4};
  LaneCursor cursor = stage.run(
      {{.from = 1, .recv = out(0, 2), .held = scratch(0, 2), .action = Action::fold_lower}});
  stage.peer().arrive(Floats{10, 20});
  CHECK(cursor.poll() == Progress::finished);
  CHECK(stage.output == (Floats{13, 24}));
  CHECK(stage.scratch == (Floats{3, 4}));
}

TEST(cursor_runs_local_steps) {
  Stage stage(3);
  stage.scratch = {5, 6, 7};
  LaneCursor cursor =
      stage.run({{.to = 0, .send = in(0, 3), .from = 0, .recv = out(0, 3), .leaf_arrived = true},
                 {.to = 0,
                  .send = scratch(0, 2),
                  .from = 0,
                  .recv = out(1, 2),
                  .action = Action::fold_upper}});
  CHECK(cursor.poll() == Progress::finished);
  CHECK(stage.output == (Floats{10, 25, 36}));
}

TEST(cursor_skips_empty_halves) {
  Stage stage(1);
  stage.peer().is_drained = true;
  LaneCursor cursor = stage.run({{.to = 1, .send = in(0, 0), .from = 1, .recv = out(0, 0)}, {}});
  CHECK(cursor.poll() == Progress::finished);
}

TEST(cursor_works_in_bounded_pieces) {
  constexpr size_t kCount = 200'000;
  Stage stage(kCount);
  LaneCursor cursor = stage.run(
      {{.to = 0, .send = in(0, kCount), .from = 0, .recv = out(0, kCount), .leaf_arrived = true}});
  size_t polls = 0, before = 0;
  while (cursor.poll() != Progress::finished) {
    CHECK(cursor.bytes_done() - before <= kPieceBytes);
    before = cursor.bytes_done();
    ++polls;
  }
  CHECK_EQUAL(polls, kCount * sizeof(float) / kPieceBytes);
  CHECK_EQUAL(stage.output.back(), 10 * static_cast<float>(kCount));
}

// ---- put ----

namespace {

constexpr size_t kLong = kShortestPut / sizeof(float);

/// A stage whose rank may put data into its peer's memory, which is `theirs`.
struct PutStage : Stage {
  explicit PutStage(size_t count) : Stage(count), theirs(count), page(new StreamPage(0)) {
    memory.members = {0, 1};
    memory.pages = {page.get(), nullptr};
    memory.abort = &failed;
    work.memory = &memory;
    work.scales = {};
  }
  bool inside() const { return page->inside.value != 0; }

  std::vector<float> theirs;
  std::unique_ptr<StreamPage> page;
  std::atomic<uint64_t> failed{0};
  StreamMemory memory;
};

Step exchange(size_t count) {
  return {.to = 1, .send = out(0, count), .from = 1, .recv = out(count, count)};
}

}  // namespace

TEST(cursor_puts_what_it_sends_where_the_peer_wants_it) {
  PutStage stage(2 * kLong);
  std::ranges::copy(stage.input, stage.output.begin());
  LaneCursor cursor = stage.run({exchange(kLong)});
  stage.peer().place.reset();
  CHECK(cursor.poll() == Progress::moved);  // the peer may sleep, and wait for our offer
  CHECK(cursor.poll() == Progress::idle);   // it has made none
  CHECK(stage.peer().offers ==
        (std::vector{std::pair(Stage::bytes(stage.output) + kShortestPut, kShortestPut)}));
  stage.peer().place = std::as_writable_bytes(std::span(stage.theirs));
  CHECK(cursor.poll() == Progress::moved);
  CHECK(std::ranges::equal(std::span(stage.theirs).first(kLong),
                           std::span(stage.input).first(kLong)));
  CHECK(stage.peer().written.empty());
  CHECK(!stage.inside());
  CHECK_EQUAL(cursor.bytes_done(), kShortestPut);
  stage.peer().arrive(Floats(kLong, 5));
  CHECK(cursor.poll() == Progress::finished);
  CHECK_EQUAL(stage.peer().offers.size(), 1U);
}

TEST(cursor_writes_what_the_peer_wants_nowhere) {
  PutStage stage(2 * kLong);
  LaneCursor cursor = stage.run({exchange(kLong)});  // the place is an empty one
  CHECK(cursor.poll() == Progress::moved);
  CHECK_EQUAL(stage.peer().written.size(), kShortestPut);
}

TEST(cursor_puts_nothing_once_the_group_has_failed) {
  PutStage stage(2 * kLong);
  stage.peer().place = std::as_writable_bytes(std::span(stage.theirs));
  LaneCursor cursor = stage.run({exchange(kLong)});
  stage.failed = 1;
  cursor.poll();
  CHECK(cursor.poll() == Progress::idle);
  CHECK(!stage.inside());
  CHECK(stage.theirs == Floats(2 * kLong));
}

TEST(cursor_offers_no_place_for_what_it_folds_or_only_receives) {
  PutStage stage(2 * kLong);
  Step folds = exchange(kLong);
  folds.action = Action::fold_upper;
  for (const Step& step : {folds, Step{.from = 1, .recv = out(0, kLong)}}) {
    stage.peer().offers.clear();
    LaneCursor cursor = stage.run({step});
    cursor.poll();
    CHECK(stage.peer().offers ==
          (std::vector{std::pair<std::byte*, size_t>(nullptr, kShortestPut)}));
  }
}

TEST(cursor_neither_offers_nor_puts_what_is_short_or_sent_to_many) {
  PutStage stage(2 * kLong);
  stage.peer().place.reset();  // it would wait
  for (const Step& step : {exchange(kLong - 1), Step{.to = 1, .send = out(0, kLong)}}) {
    LaneCursor cursor = stage.run({step});
    stage.peer().written.clear();
    cursor.poll();
    CHECK(stage.peer().offers.empty());
    CHECK_EQUAL(stage.peer().written.size(), step.send.count * sizeof(float));
  }
}

TEST(cursor_gives_all_that_is_ready_to_a_channel_that_sends_it_from_where_it_is) {
  constexpr size_t kCount = 3 * kPieceBytes / sizeof(float);
  Stage stage(kCount);
  Scripted& peer = stage.peer();
  peer.does_copy = true;
  peer.rule = {.shortest = kPieceBytes};
  peer.place.reset();  // the peer takes nothing yet
  LaneCursor cursor = stage.run({{.to = 1, .send = in(0, kCount)}, {.from = 1, .recv = in(0, 2)}});
  cursor.poll();
  CHECK(peer.written.empty());
  peer.place.emplace();
  peer.does_refer = true;
  peer.arrive(Floats{7, 8});
  CHECK(cursor.poll() == Progress::moved);
  CHECK_EQUAL(floats(peer.written), kCount);
  CHECK(cursor.poll() == Progress::idle);
  CHECK_EQUAL(stage.input[0], 1.0F);  // still the channel's
  peer.does_refer = false;
  CHECK(cursor.poll() == Progress::finished);
  CHECK_EQUAL(stage.input[0], 7.0F);
}

TEST(cursor_offers_such_a_channel_a_place_for_all_that_lies_as_it_comes) {
  constexpr size_t kCount = kPieceBytes / sizeof(float);
  Stage stage(2 * kCount);
  stage.peer().rule = {.shortest = kPieceBytes};
  LaneCursor only_receives = stage.run({{.from = 1, .recv = out(kCount, kCount)}});
  only_receives.poll();
  LaneCursor folds = stage.run({{.from = 1, .recv = out(0, kCount), .action = Action::fold_upper}});
  folds.poll();
  LaneCursor is_short = stage.run({{.from = 1, .recv = out(0, kCount - 1)}});
  is_short.poll();
  CHECK(stage.peer().offers ==
        (std::vector{std::pair(Stage::bytes(stage.output) + kPieceBytes, kPieceBytes),
                     std::pair<std::byte*, size_t>(nullptr, kPieceBytes)}));
}
